"""Where a stranger's answer runs: bubblewrap (https://github.com/containers/bubblewrap), if the system has it.

Inside there are Python, the system's programs and libraries, the course, and the answers of one student. All of them
can be read, and nothing can be written but in an empty /tmp. There is no network. Processes see only each other, and
end together. Without bubblewrap, root runs answers as a user without rights.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.exercises.course import ROOT

OPEN = (
    "No bubblewrap here (apt install bubblewrap): answers run with your rights. They can read and write your files, "
    "and end your processes, among them the checks of other students."
)
PARTS = ("minizero", "flash", "precision", "tests/exercises", "tests/support", "pyproject.toml")  # a check reads them
FIRST_USER, USERS, NUMBER = 61_200, 2_000, itertools.count()  # numbers that no distribution gives to a person
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


def wall(shown: Path) -> list[str]:
    """The words of a command that runs another one inside, which sees the absolute path `shown`.

    For root without bubblewrap each call has a user of its own, so that no answer ends another one's processes. Where
    there is no wall they are `env`, which changes nothing.
    """
    return _bubble(shown) if has_one() else nobody(FIRST_USER + next(NUMBER) % USERS) or ["env"]


def end_all(words: Sequence[str]) -> None:
    """End the processes of the user that only these words, of `wall`, have."""
    user = next((word.removeprefix("--reuid=") for word in words if word.startswith("--reuid=")), None)
    for status in Path("/proc").glob("[0-9]*/status") if user else ():
        with contextlib.suppress(OSError):  # it has ended
            if f"\nUid:\t{user}\t" in status.read_text(errors="replace"):
                os.kill(int(status.parent.name), signal.SIGKILL)


def _bubble(*shown: Path) -> list[str]:
    words = ["bwrap", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--setenv", "USER", "student"]
    python = {sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).is_dir())} - {str(ROOT), ""}
    for path in (*SYSTEM, *sorted(python), *(str(ROOT / part) for part in PARTS), *map(str, shown)):
        words += ["--ro-bind-try", path, path]
    return [*words, "--unshare-all", "--die-with-parent", "--new-session"]


@functools.cache
def nobody(user: int = FIRST_USER) -> list[str]:
    """For root: the words of a command that runs another one as this user, who has no rights, no files and no name.

    Such a user writes to no file of root. Empty where there is no such command, or where that user cannot read this.
    """
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
    if getattr(os, "geteuid", lambda: -1)() != 0 or shutil.which("setpriv") is None:
        return []
    return words if _works([*words, sys.executable, "-c", f"open({str(ROOT / 'pyproject.toml')!r})"]) else []


@functools.cache
def has_one() -> bool:
    """Whether bubblewrap is there, and may do its work: some systems forbid it."""
    return shutil.which("bwrap") is not None and _works([*_bubble(), sys.executable, "-c", "pass"])


def _works(command: list[str]) -> bool:
    return subprocess.run(command, cwd="/", capture_output=True, timeout=60).returncode == 0
