#!/usr/bin/env bash
# Gradescope runs this once, as root on Ubuntu, to build the image in which each submission is checked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
fits() { "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }
# Ubuntu 24.04 has Python 3.12, and its ensurepip in a package of its own. Ubuntu 22.04 has 3.10, and 3.11 beside it.
for package in none python3-venv python3.11-venv; do
    [ $package = none ] || { apt-get update -q && apt-get install -y -q $package; }
    for python in python3.13 python3.12 python3.11 python3; do fits $python && break 2; done
done
# A build of torch for CPUs is 0.2 GB, and the usual one 3 GB. To choose another place, set the variable.
export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}"
$python -m venv .venv
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
