#!/usr/bin/env bash
# Gradescope runs this once, as root on Ubuntu, to build the image in which each submission is checked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
fits() { "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }
for python in python3.13 python3.12 python3.11 python3 none; do fits $python && break; done
if [ $python = none ]; then # Ubuntu 22.04 has 3.10 only, and 3.11 beside it
    apt-get install -y -q python3.11 python3.11-venv
    python=python3.11
fi
# A build of torch for CPUs is 0.2 GB, and the usual one 3 GB. To choose another place, set the variable.
export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}"
$python -m venv .venv
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
