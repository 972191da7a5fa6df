"""Check answers in processes of their own: `run` checks one file, a `Checker` many.

    this process        asks for a file, and waits
    the host            imports torch once; never imports an answer
    a child of it       runs one answer, within limits (where a process can fork; else the host itself)
    the judge           is given what the answer did, as data; compares it with the package's function, and speaks

What an answer did goes up through pipes and begins with a secret, drawn for each check. An answer that finds the secret
can say that it did something else. It gains nothing: it would have to say what the package's function does.
"""

import atexit
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

HARD = 1.5  # times its seconds of computing, an operation that cannot be interrupted is ended
WAIT_SECONDS = 60.0  # of the clock without computing, after which what only waits is ended
IDLE_SECONDS = 0.5  # of computing within WAIT_SECONDS that count as none
SILENCE = 900.0  # seconds without a word from the host, after which it is ended
MEMORY = 8 * 2**30  # bytes of addresses, of which torch's libraries take a part
FILE = 64 * 2**20  # bytes of a file that an answer writes, and of what it prints
PROCESSES = 2048  # of the user, the answer's among them; root has no such limit
CAN_FORK = sys.platform == "linux"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


class Process:
    """The host, or the judge. It is asked line by line."""

    def __init__(self, role: str, wall: Sequence[str] = ()) -> None:
        given = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp"} if wall else os.environ
        command = [*wall, sys.executable, "-m", "tests.exercises.machine.checker", role]
        self.pipes = subprocess.Popen(
            command, cwd=ROOT, env={**given, **ENVIRONMENT},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.replies: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_read_lines, args=(self.pipes.stdout, self.replies), daemon=True).start()

    def tell(self, **asked: Any) -> None:
        assert self.pipes.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: so have its replies
            self.pipes.stdin.write(json.dumps(asked).encode() + b"\n")
            self.pipes.stdin.flush()

    def reply(self) -> bytes:
        """Its next line; nothing if it has ended, or is silent for too long."""
        try:
            reply = self.replies.get(timeout=SILENCE)
            if reply == b"":  # it has ended
                self.pipes.wait()
        except queue.Empty:
            reply = b""
        return reply

    def close(self) -> None:
        """End it, and all processes of its group."""
        _end_group(self.pipes.pid)
        self.pipes.kill()
        self.pipes.wait()
        for pipe in (self.pipes.stdin, self.pipes.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


class Checker:
    """A host, started at the first check, and again if an answer ended it.

    wall: the words of a command that shuts the host in (`sandbox.py`). wait: seconds that an answer may do nothing.
    seed: of the drawn cases; by default the environment variable SEED, or each check draws its own.
    """

    def __init__(self, wall: Sequence[str] = (), wait: float = WAIT_SECONDS, seed: str = "") -> None:
        self.wall, self.wait, self.seed = list(wall), wait, seed or os.environ.get("SEED", "")
        self.host: Process | None = None

    def __enter__(self) -> "Checker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def check(self, exercise: Exercise, path: Path, what: str = "examine") -> Outcome:
        """How the check of the answer in `path` ends. what: "ask" asks questions on it instead (questions.py)."""
        said = runner.look(exercise, path)
        if said is not None:
            return said
        seed, secret = self.seed or str(secrets.randbelow(10**6)), secrets.token_hex()
        asked = {"exercise": exercise.id, "path": str(path.absolute()), "seed": seed, "secret": secret}
        self.host = self.host or Process("host", self.wall)  # it imports torch while the judge does its part
        may = runner.SECONDS, self.wait
        if what == "examine":
            may = tuple(map(max, may, _judged(asked) or may))
        self.host.tell(**asked, may=may, what=what)
        seen = _seen(self.host.reply(), secret)
        if seen is None or not CAN_FORK:
            seen = seen or _ended(self.host.pipes.poll())
            self.host.close()
            self.host = None
        if what != "examine":
            return Outcome(**seen["said"])
        no_verdict = Outcome("failed", "no-verdict", "The judge has ended without a verdict: check the file once more.")
        verdict = _judged(asked | {"seen": seen}) or dataclasses.asdict(no_verdict)
        return Outcome(**verdict | {"printed": str(seen.get("printed", ""))[-4000:]})

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
        self.host = None


JUDGE: list[Process] = []  # one for all, at most
ONE_AT_A_TIME = threading.Lock()


def _judged(asked: dict[str, Any]) -> Any:
    """The judge's verdict on what was seen; without `seen`, how long the answer may take. None if it has ended."""
    with ONE_AT_A_TIME:
        if not JUDGE:
            JUDGE.append(Process("judge"))
            atexit.register(_dismiss)
        JUDGE[0].tell(**asked)
        if reply := JUDGE[0].reply():
            return json.loads(reply)
        _dismiss()
    return None


def _dismiss() -> None:
    while JUDGE:
        JUDGE.pop().close()


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


def _seen(said: bytes, secret: str) -> dict[str, Any] | None:
    """What was seen of an answer, if the secret stands before it."""
    try:
        seen = json.loads(said[len(secret) :]) if said.startswith(secret.encode()) else None
    except ValueError:
        return None
    return seen if isinstance(seen, dict) else None


def _ended(status: int | None) -> dict[str, Any]:
    """In words: the process of the answer ended and did not say what it saw. status: negative for a signal."""
    if status is None:
        words = f"After {SILENCE:g} seconds there was no verdict. Does the file stop or end other processes?"
        return _failed("endless", words)
    if status >= 0:
        words = f"The process ended (exit status {status}) before the check did. Does the file call exit?"
        return _failed("ended", words)
    name = signal.Signals(-status).name
    if name == "SIGXCPU":
        words = "The check computed on and on, in an operation that cannot be interrupted. Is there a loop that never "
        words += "ends, or a very large tensor?"
        return _failed("endless", words)
    if name == "SIGKILL":
        words = "The process was killed: by the system, for want of memory, or by the file itself."
        return _failed("killed", words)
    return _failed("crash", f"Python itself crashed ({name}): was memory read that had been given back?")


def _failed(name: str, words: str) -> dict[str, Any]:
    return _seen_of(Outcome("failed", name, words))


def _seen_of(said: Outcome) -> dict[str, Any]:
    return {"said": dataclasses.asdict(said), "cases": []}


def _end_group(leader: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows has no groups; or all of them have ended
        os.killpg(leader, signal.SIGKILL)


# What follows runs in the host or in its child, or in the judge.


def main() -> None:
    """`python -m tests.exercises.machine.checker host`, or judge: reads a request a line, and writes a reply a line."""
    channel = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(channel, False)
    import torch

    torch.set_num_threads(1)
    serve = _judge() if sys.argv[1] == "judge" else _host
    for line in sys.stdin:
        asked = json.loads(line)
        exercise = next(e for e in COURSE if e.id == asked["exercise"])
        exercise.load()
        serve(channel, exercise, Path(asked["path"]), asked)


def _judge() -> Callable[..., None]:
    from tests.exercises.machine.judge import Judge

    judge = Judge()

    def serve(channel: int, exercise: Exercise, path: Path, asked: dict[str, Any]) -> None:
        """Without `seen` it only prepares, and says how long the answer may take."""
        if "seen" not in asked:
            return _write(channel, "", judge.prepare(exercise, asked["seed"]))
        outcome = dataclasses.asdict(judge.verdict(exercise, path, asked["seed"], asked["seen"]))
        del outcome["printed"]
        _write(channel, "", outcome)

    return serve


def _host(channel: int, exercise: Exercise, path: Path, asked: dict[str, Any]) -> None:
    seconds, wait = asked["may"]
    check: Callable[[], dict[str, Any]] = functools.partial(runner.observe, exercise, path, asked["seed"], seconds)
    if asked["what"] == "ask":
        from tests.exercises import questions

        check = lambda: _seen_of(questions.ask(exercise, path))  # noqa: E731
    with tempfile.TemporaryFile() as printed:
        if CAN_FORK:
            seen = _in_a_child(check, path, seconds, wait, printed, channel)
        else:
            end = functools.partial(_end, channel, asked["secret"])
            seen = _here(check, path, seconds, wait, printed, end)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - 4000))
        seen["printed"] = printed.read().decode(errors="replace").strip()
        _write(channel, asked["secret"], seen)


def _write(channel: int, secret: str, said: Any) -> None:
    left = memoryview(f"{secret}{json.dumps(said)}\n".encode())
    while left:
        left = left[os.write(channel, left) :]


def _end(channel: int, secret: str, said: dict[str, Any]) -> None:
    _write(channel, secret, said)
    os._exit(0)  # a rank may still compute


def _in_a_child(
    check: Callable[[], dict[str, Any]], path: Path, seconds: float, wait: float, printed: Any, channel: int
) -> dict[str, Any]:
    """Fork, run the answer in the child, and end all that the child has started."""
    secret = secrets.token_hex()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            os.close(channel)
            os.close(receive)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _limit(int(HARD * seconds) + 3)  # after `_watch` had its turn
            end = functools.partial(_end, send, secret)
            end(_here(check, path, seconds, wait, printed, end))
        os._exit(1)
    os.close(send)
    said, until = b"", time.monotonic() + SILENCE / 2
    while len(said) < FILE and not (said[-1:] == b"\n" and _seen(said, secret)) and time.monotonic() < until:
        if select.select([receive], [], [], 0.2)[0]:
            if not (part := os.read(receive, 2**20)):
                break
            said += part
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # something else may hold the pipe
            break
    os.close(receive)
    _end_group(child)
    _, status = os.waitpid(child, 0)
    return _seen(said, secret) or _ended(os.waitstatus_to_exitcode(status))


def _limit(seconds: int) -> None:
    """Limits of the system for this process and those that it starts. It ends with its parent."""
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, allowed = resource.getrlimit(what)
        if allowed == resource.RLIM_INFINITY or most < allowed:
            resource.setrlimit(what, (most, most + 2))  # a process hears of the first, and cannot outlive the second


def _here(
    check: Callable[[], dict[str, Any]],
    path: Path,
    seconds: float,
    wait: float,
    printed: Any,
    end: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Run the answer in this process. `end` is called, from another thread, if the check takes too long."""
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    threading.Thread(target=_watch, args=(path, HARD * seconds, wait, end), daemon=True).start()
    said = check()
    with contextlib.suppress(Exception):  # the answer may have closed it
        sys.stdout.flush()
    return said


def _watch(path: Path, seconds: float, wait: float, end: Callable[[dict[str, Any]], None]) -> None:
    """End a check that computes, or waits, without an end: for what no timer interrupts."""
    start = seen = time.process_time()
    moved = time.monotonic()
    while time.process_time() - start < seconds:
        time.sleep(0.1)
        if time.process_time() - seen > IDLE_SECONDS:
            seen, moved = time.process_time(), time.monotonic()
        if time.monotonic() - moved > wait:
            end(_seen_of(runner.endless(f"For {wait:g} seconds it hardly computed, and", runner.places(path))))
    end(_seen_of(runner.endless(f"After {seconds:.0f} seconds of computing", runner.places(path))))


if __name__ == "__main__":
    main()
