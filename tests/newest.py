"""python -m tests.newest: the newest version of every dependency, installed and tried.

"torch>=2.11" promises that what comes tomorrow runs, too. `make setup` installs what was tested (constraints.txt), and
would not notice. An environment of its own, .venv-newest, is brought up to date each time. Pip's settings decide
whether its torch is a CPU build, as for `make setup`. In it run the checks of `tests.oldest`, and those for a pretend
GPU: new versions of torch and Triton choose other kernels.
"""

import sys

from tests.oldest import CHECKS, requirements, tried

if __name__ == "__main__":
    pretend = ["pytest", "-q", "-n", "2", "-m", "pretend and not soak"]
    sys.exit(tried(".venv-newest", "newest", ["--upgrade", *requirements()], [*CHECKS, pretend]))
