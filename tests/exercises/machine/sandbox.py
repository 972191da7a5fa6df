"""Where a stranger's answer runs: bubblewrap (https://github.com/containers/bubblewrap), if the system has it.

Inside, all files can be read but for the other submissions, and none can be written but in an empty /tmp. There is no
network. Processes see only each other, and end together.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.exercises.course import ROOT

OPEN = "No bubblewrap here (apt install bubblewrap): answers run with your rights, and can read and write your files."


def wall(hidden: Path, shown: Path) -> list[str]:
    """The words of a command that runs another one inside. Empty where there is no sandbox.

    hidden: an absolute path of a folder, of which an answer sees only `shown`.
    """
    if not has_one():
        return []
    words = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for folder in (ROOT, Path(sys.prefix).resolve()):  # they may lie in /tmp
        words += ["--ro-bind", str(folder), str(folder)]
    words += ["--tmpfs", str(hidden), "--ro-bind", str(shown), str(shown)]
    return [*words, "--unshare-all", "--die-with-parent", "--new-session"]


@functools.cache
def nobody() -> list[str]:
    """For root where there is no bubblewrap: the words of a command that runs another one as a user without rights.

    Such a user writes to no file of root. Empty where there is no such command, or where that user cannot read this.
    """
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    if getattr(os, "geteuid", lambda: -1)() != 0 or shutil.which("setpriv") is None:
        return []
    tried = [*words, sys.executable, "-c", f"open({str(ROOT / 'pyproject.toml')!r})"]
    return words if subprocess.run(tried, cwd="/", capture_output=True, timeout=60).returncode == 0 else []


@functools.cache
def has_one() -> bool:
    """Whether bubblewrap is there, and may do its work: some systems forbid it."""
    if shutil.which("bwrap") is None:
        return False
    tried = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-all", "true"]
    return subprocess.run(tried, capture_output=True, timeout=60).returncode == 0
