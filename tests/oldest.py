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
CHECKS = [
    ["pytest", "-q", "-n", "2"],
    ["pytest", "-q", "-m", "lessons", "tests/test_notebooks.py", "-k", "00_where or 09_all"],
]
if sys.platform == "linux":  # Triton is not elsewhere
    CHECKS.append(["flash.compile", "--gpus", "sm_80", "sm_90", "--head-dims", "64", "128"])


def requirements() -> list[str]:
    """Every requirement of the project, such as "torch>=2.11"; also what builds it. The extra `real` is left out."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = file["project"]
    extras = [*project["optional-dependencies"]["dev"], *project["optional-dependencies"]["notebooks"]]
    wanted = [*file["build-system"]["requires"], *project["dependencies"], *extras]
    return [each for each in wanted if not each.startswith("minizero")]


def tried(folder: str, words: str, packages: list[str], checks: list[list[str]]) -> int:
    """Install the packages into an environment of their own, and run the checks in it: 0, or the first other status."""
    python = ROOT / folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(ROOT / folder, with_pip=True)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for each in (packages, ["--no-deps", "--no-build-isolation", "-e", ROOT]):
        subprocess.run([*install, *each], cwd=ROOT, check=True)
    for arguments in checks:
        print(f"\n== with the {words} versions: python -m " + " ".join(arguments), flush=True)
        if status := subprocess.run([python, "-m", *arguments], cwd=ROOT).returncode:
            return status
    return 0


if __name__ == "__main__":
    lowest = [each.replace(">=", "==") for each in requirements()]
    sys.exit(tried(".venv-oldest", "oldest", lowest, CHECKS))
