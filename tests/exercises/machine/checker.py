"""Check answers in a process of their own: `run` checks one file, a `Checker` many.

    this process        asks for a file, and waits
    the host            imports torch once; never imports an answer; says how each check ended
    a child of it       runs one answer and its check, within limits (where a process can fork; else the host itself)

The verdict goes up through pipes and begins with a secret, drawn for each check. An answer that prints "passed", writes
files or ends the process gives itself no verdict. An answer that searches the interpreter finds the secret: there is
no wall inside a process.
"""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.exercises.course import COURSE, ROOT, Exercise
from tests.exercises.machine import runner
from tests.exercises.machine.runner import Outcome

HARD_SECONDS = 9.0  # of computing, after which an operation that cannot be interrupted is ended
WAIT_SECONDS = 60.0  # of the clock without computing, after which what only waits is ended
IDLE_SECONDS = 0.5  # of computing within WAIT_SECONDS that count as none
SILENCE = 900.0  # seconds without a word from the host, after which it is ended
MEMORY = 8 * 2**30  # bytes of addresses, of which torch's libraries take a part
FILE = 64 * 2**20  # bytes of a file that an answer writes, and of what it prints
PROCESSES = 2048  # of the user, the answer's among them; root has no such limit
CAN_FORK = sys.platform == "linux"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


class Checker:
    """A host process, started at the first check, and again if an answer ended it.

    wall: the words of a command that shuts the host in (`sandbox.py`). wait: seconds that an answer may do nothing.
    seed: of the random stage (`draws.py`); without one, each check draws its own.
    """

    def __init__(self, wall: Sequence[str] = (), wait: float = WAIT_SECONDS, seed: str = "") -> None:
        self.wall, self.wait, self.seed = list(wall), wait, seed
        self.host: subprocess.Popen[bytes] | None = None
        self.replies: queue.Queue[bytes] = queue.Queue()

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def check(self, exercise: Exercise, path: Path, what: str = "examine") -> Outcome:
        """How the check of the answer in `path` ends. what: "ask" asks questions on it instead (questions.py)."""
        said = runner.look(exercise, path)
        if said is not None:
            return said
        if self.host is None:
            self._start()
        assert self.host is not None and self.host.stdin is not None
        secret = secrets.token_hex()
        asked = {"exercise": exercise.id, "path": str(path.absolute()), "secret": secret, "wait": self.wait}
        asked["what"] = what
        with contextlib.suppress(OSError):  # it has ended: so have its replies
            self.host.stdin.write(json.dumps(asked).encode() + b"\n")
            self.host.stdin.flush()
        try:
            reply = self.replies.get(timeout=SILENCE)
            if reply == b"":  # the host has ended
                self.host.wait()
        except queue.Empty:
            reply = b""
        outcome = _outcome(reply, secret)
        if outcome is None or not CAN_FORK:
            outcome = outcome or _ended(self.host.poll())
            self.close()
        return outcome

    def close(self) -> None:
        """End the host, and all processes of its group."""
        host, self.host = self.host, None
        if host is not None:
            _end_group(host.pid)
            host.kill()
            host.wait()
            for pipe in (host.stdin, host.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        command = [*self.wall, sys.executable, "-m", "tests.exercises.machine.checker"]
        given = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp"} if self.wall else os.environ
        seed = {"SEED": self.seed} if self.seed else {}
        self.host = subprocess.Popen(
            command, cwd=ROOT, env={**given, **ENVIRONMENT, **seed}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.replies = queue.Queue()
        threading.Thread(target=_read_lines, args=(self.host.stdout, self.replies), daemon=True).start()


def run(exercise: Exercise, path: Path) -> Outcome:
    """Check the answer in `path`, in a process of its own. That process ends in any case."""
    with Checker() as checker:
        return checker.check(exercise, path)


def _read_lines(pipe: Any, lines: "queue.Queue[bytes]") -> None:
    """Each line of the pipe, and an empty one at its end."""
    with contextlib.suppress(OSError, ValueError):
        while line := pipe.readline():
            lines.put(line)
    lines.put(b"")


def _outcome(said: bytes, secret: str) -> Outcome | None:
    """What was said, if the secret stands before it."""
    if not said.startswith(secret.encode()):
        return None
    return Outcome(**json.loads(said[len(secret) :]))


def _ended(status: int | None) -> Outcome:
    """In words: the process of the answer ended without a verdict. status: negative for a signal."""
    if status is None:
        words = f"After {SILENCE:g} seconds there was no verdict. Does the file stop or end other processes?"
        return Outcome("failed", "endless", words)
    if status >= 0:
        words = f"The process ended (exit status {status}) before the check did. Does the file call exit?"
        return Outcome("failed", "ended", words)
    name = signal.Signals(-status).name
    if name == "SIGXCPU":
        words = f"After {HARD_SECONDS:g} seconds of computing the check still ran, in an operation that cannot be "
        words += "interrupted. Is there a loop that never ends, or a very large tensor?"
        return Outcome("failed", "endless", words)
    if name == "SIGKILL":
        words = "The process was killed: by the system, for want of memory, or by the file itself."
        return Outcome("failed", "killed", words)
    return Outcome("failed", "crash", f"Python itself crashed ({name}): was memory read that had been given back?")


def _end_group(leader: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows has no groups; or all of them have ended
        os.killpg(leader, signal.SIGKILL)


# What follows runs in the host, or in its child.


def main() -> None:
    """The host: `python -m tests.exercises.machine.checker`. Reads a request a line, and writes a verdict a line."""
    channel = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(channel, False)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        exercise, path = next(e for e in COURSE if e.id == asked["exercise"]), Path(asked["path"])
        exercise.load()
        check = functools.partial(runner.examine, exercise, path)
        if asked["what"] == "ask":
            from tests.exercises import questions

            check = functools.partial(questions.ask, exercise, path)
        with tempfile.TemporaryFile() as printed:
            if CAN_FORK:
                said = _in_a_child(check, path, asked["wait"], printed, channel)
            else:
                end = functools.partial(_end, channel, asked["secret"])
                said = _here(check, path, asked["wait"], printed, end)
            printed.seek(max(0, printed.seek(0, os.SEEK_END) - 4000))
            said.printed = printed.read().decode(errors="replace").strip()
            _write(channel, asked["secret"], said)


def _write(channel: int, secret: str, said: Outcome) -> None:
    left = f"{secret}{json.dumps(dataclasses.asdict(said))}\n".encode()
    while left:
        left = left[os.write(channel, left) :]


def _end(channel: int, secret: str, said: Outcome) -> None:
    _write(channel, secret, said)
    os._exit(0)  # a rank may still compute


def _in_a_child(check: Callable[[], Outcome], path: Path, wait: float, printed: Any, channel: int) -> Outcome:
    """Fork, check in the child, and end all that the child has started."""
    secret = secrets.token_hex()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            os.close(channel)
            os.close(receive)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _limit()
            end = functools.partial(_end, send, secret)
            end(_here(check, path, wait, printed, end))
        os._exit(1)
    os.close(send)
    said = b""
    while select.select([receive], [], [], SILENCE / 2)[0] and (part := os.read(receive, 2**16)):
        said += part
    os.close(receive)
    _end_group(child)
    _, status = os.waitpid(child, 0)
    return _outcome(said, secret) or _ended(os.waitstatus_to_exitcode(status))


def _limit() -> None:
    """Limits of the system for this process and those that it starts. It ends with its parent."""
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    for what, most in (
        (resource.RLIMIT_CPU, int(HARD_SECONDS) + 3),  # after `_watch` had its turn
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, allowed = resource.getrlimit(what)
        if allowed == resource.RLIM_INFINITY or most < allowed:
            resource.setrlimit(what, (most, most + 2))  # a process hears of the first, and cannot outlive the second


def _here(
    check: Callable[[], Outcome], path: Path, wait: float, printed: Any, end: Callable[[Outcome], None]
) -> Outcome:
    """Check in this process. `end` is called, from another thread, if the check takes too long."""
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    threading.Thread(target=_watch, args=(path, wait, end), daemon=True).start()
    said = check()
    with contextlib.suppress(Exception):  # the answer may have closed it
        sys.stdout.flush()
    return said


def _watch(path: Path, wait: float, end: Callable[[Outcome], None]) -> None:
    """End a check that computes, or waits, without an end: for what no timer interrupts."""
    start = seen = time.process_time()
    moved = time.monotonic()
    while time.process_time() - start < HARD_SECONDS:
        time.sleep(0.1)
        if time.process_time() - seen > IDLE_SECONDS:
            seen, moved = time.process_time(), time.monotonic()
        if time.monotonic() - moved > wait:
            end(runner.endless(f"For {wait:g} seconds it hardly computed, and", runner.places(path)))
    end(runner.endless(f"After {HARD_SECONDS:g} seconds of computing", runner.places(path)))


if __name__ == "__main__":
    main()
