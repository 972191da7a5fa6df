"""python -m tests.oldest: the lowest version that pyproject.toml names of every dependency, installed and tried.

"torch>=2.11" promises that 2.11 runs. An environment of its own, .venv-oldest, has these versions and no newer one.
In it run the quick tests, the compiler of the kernels, and two notebooks that run the X-ray on "meta". The extra
`real` is left out: its models are of libraries that change each month.
"""

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-oldest"
PYTHON = FOLDER / ("Scripts" if os.name == "nt" else "bin") / "python"
CHECKS = [
    ["pytest", "-q", "-n", "2"],
    ["pytest", "-q", "-m", "lessons", "tests/test_notebooks.py", "-k", "00_where or 09_all"],
]
if sys.platform == "linux":  # Triton is not elsewhere
    CHECKS.append(["flash.compile", "--gpus", "sm_80", "sm_90", "--head-dims", "64", "128"])


def lowest() -> list[str]:
    """Every requirement of the project, "torch>=2.11" as "torch==2.11"; also what builds it."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = file["project"]
    extras = [*project["optional-dependencies"]["dev"], *project["optional-dependencies"]["notebooks"]]
    wanted = [*file["build-system"]["requires"], *project["dependencies"], *extras]
    return [each.replace(">=", "==") for each in wanted if not each.startswith("minizero")]


def main() -> int:
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=True)
    install = [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for packages in (lowest(), ["--no-deps", "--no-build-isolation", "-e", ROOT]):
        subprocess.run([*install, *packages], cwd=ROOT, check=True)
    for arguments in CHECKS:
        print("\n== with the oldest versions: python -m " + " ".join(arguments), flush=True)
        if status := subprocess.run([PYTHON, "-m", *arguments], cwd=ROOT).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
