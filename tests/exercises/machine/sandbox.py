"""Where a stranger's answer runs: bubblewrap (https://github.com/containers/bubblewrap), if the system has it.

Inside there are Python, the system's programs and libraries, the course, and the answers of one student. All of them
can be read, and nothing can be written but in an empty /tmp. There is no network. Processes see only each other, and
end together. Without bubblewrap, root runs answers as a user without rights.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.exercises.course import ROOT

OPEN = "No bubblewrap here (apt install bubblewrap): answers run with your rights, and can read and write your files."
PARTS = ("minizero", "flash", "precision", "tests/exercises", "tests/support", "pyproject.toml")  # a check reads them
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


def wall(shown: Path) -> list[str]:
    """The words of a command that runs another one inside, which sees the absolute path `shown`.

    Where there is no wall they are `env`, which changes nothing.
    """
    return _bubble(shown) if has_one() else nobody() or ["env"]


def _bubble(*shown: Path) -> list[str]:
    words = ["bwrap", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--setenv", "USER", "student"]
    python = {sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).is_dir())} - {str(ROOT), ""}
    for path in (*SYSTEM, *sorted(python), *(str(ROOT / part) for part in PARTS), *map(str, shown)):
        words += ["--ro-bind-try", path, path]
    return [*words, "--unshare-all", "--die-with-parent", "--new-session"]


@functools.cache
def nobody() -> list[str]:
    """For root: the words of a command that runs another one as a user without rights.

    Such a user writes to no file of root. Empty where there is no such command, or where that user cannot read this.
    """
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    if getattr(os, "geteuid", lambda: -1)() != 0 or shutil.which("setpriv") is None:
        return []
    return words if _works([*words, sys.executable, "-c", f"open({str(ROOT / 'pyproject.toml')!r})"]) else []


@functools.cache
def has_one() -> bool:
    """Whether bubblewrap is there, and may do its work: some systems forbid it."""
    return shutil.which("bwrap") is not None and _works([*_bubble(), sys.executable, "-c", "pass"])


def _works(command: list[str]) -> bool:
    return subprocess.run(command, cwd="/", capture_output=True, timeout=60).returncode == 0
