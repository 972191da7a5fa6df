"""Check answers in processes of their own: `run` checks one file, a `Checker` many.

    this process        asks for a file, case by case, and ends the check at the first case that is wrong
    the host            imports torch once; never imports an answer
    a child of it       reads and runs one answer, within limits (where a process can fork; else the host itself)
    the judge           is given what the answer did, as data; compares it with the package's function, and speaks

The host forks a judge when it has imported torch, and before there is an answer. A host behind a wall (`sandbox.py`)
does not: all such hosts have one judge, which is outside.

Each reply, of the host and of the judge, begins with a number that was drawn for the request: what else comes through
a pipe is thrown away. No other process of the same user can open these pipes or read that memory (Linux; not root's).
An answer that finds the number of its own child can say that it did something else. It gains nothing: it would have to
say what the package's function does.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import math
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
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.exercises.course import ROOT, Exercise, find
from tests.exercises.machine import runner, sandbox
from tests.exercises.machine.runner import Outcome

HARD = 1.5  # times its seconds of computing, an operation that cannot be interrupted is ended
WAIT_SECONDS = 60.0  # of the clock without computing, after which what only waits is ended
IDLE_SECONDS = 0.5  # of computing within WAIT_SECONDS that count as none
SILENCE = 900.0  # seconds without a word from the host, after which it is ended
MEMORY = 8 * 2**30  # bytes of addresses, of which torch's libraries take a part
FILE = 64 * 2**20  # bytes of a file that an answer writes, and of what it prints
LINE = 16 * 2**20  # bytes of a reply
PROCESSES = 2048  # of the user, the answer's among them; root has no such limit
CAN_FORK = sys.platform == "linux"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


class Process:
    """The host, or the judge. It is asked line by line. leader: itself, or the host that has forked it."""

    def __init__(self, leader: subprocess.Popen[bytes], stdin: Any, stdout: Any) -> None:
        self.leader, self.stdin, self.over = leader, stdin, False
        self.replies: queue.Queue[bytes] = queue.Queue(8)  # who writes more than is read must wait
        threading.Thread(target=_read_lines, args=(stdout, self.replies), daemon=True).start()

    def tell(self, **asked: Any) -> str:
        """Ask. Returns the number that the reply will begin with."""
        number = secrets.token_hex()
        with contextlib.suppress(OSError):  # it has ended: so have its replies
            self.stdin.write(json.dumps({"number": number, **asked}).encode() + b"\n")
            self.stdin.flush()
        return number

    def ask(self, **asked: Any) -> Any:
        """Its reply; None if it has ended, or is silent for too long. Lines without the number are left out."""
        number, until = self.tell(**asked), time.monotonic() + SILENCE
        while not self.over:
            try:
                line = self.replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if (said := _said(line, number)) is not None:
                return said
            self.over = line == b""  # it has ended
        return None

    def close(self) -> None:
        """End it, and all processes of its leader's group."""
        _end_group(self.leader.pid)
        self.leader.kill()
        self.leader.wait()
        self.over = True
        with contextlib.suppress(OSError):
            self.stdin.close()
        with contextlib.suppress(queue.Empty):
            while self.replies.get(timeout=1.0):  # so that the thread that reads comes to the end
                pass


def start(*words: str, wall: Sequence[str] = (), fds: Sequence[int] = ()) -> Process:
    """The host, or the judge. words: what `main` is given."""
    _private()
    given = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/tmp"} if wall else os.environ
    command = [*wall, sys.executable, "-m", "tests.exercises.machine.checker", *words]
    started = subprocess.Popen(
        command, cwd=ROOT, env={**given, **ENVIRONMENT}, pass_fds=fds,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    return Process(started, started.stdin, started.stdout)


def start_both(exercise: Exercise) -> tuple[Process, Process]:
    """A host, and the judge that it forks once it has loaded what the exercise needs."""
    (requests, tell), (receive, send) = os.pipe(), os.pipe()
    host = start("host", exercise.id, str(requests), str(send), fds=(requests, send))
    os.close(requests)
    os.close(send)
    return host, Process(host.leader, open(tell, "wb"), open(receive, "rb"))


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
        if (looked := runner.look(exercise, path)) is not None:
            return looked
        asked = {
            "exercise": exercise.id,
            "path": str(path.absolute()),
            "seed": self.seed or str(secrets.randbelow(10**6)),
        }
        if self.host is None and CAN_FORK and not self.wall and not JUDGE:
            self.host, judge = start_both(exercise)
            JUDGE.append(judge)
        self.host = self.host or start("host", wall=self.wall)
        self.host.tell(**asked, what=what, wait=self.wait)  # it goes to work while the judge does its part
        said: dict[str, Any] = {"may": 4 * runner.SECONDS, "doubt": None}
        count = 0
        if what == "examine":
            said = _judged(**asked, count=0)
        while "may" in said:
            seen = self.host.ask(may=said["may"])
            if not isinstance(seen, dict):
                seen = {"end": _ended(self.host.leader.wait() if self.host.over else None)}
            count += 1
            if what == "examine":
                said = _judged(**asked, count=count, seen=seen, doubt=said["doubt"])
            else:
                said = {"verdict": seen["end"]}
        printed = self.host.ask(stop=True)
        if printed is None or not CAN_FORK:
            self.close()
        return Outcome(**said["verdict"] | {"printed": str(printed or "")[-4000:]})

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
            sandbox.end_all(self.wall)
            if JUDGE and JUDGE[0].leader is self.host.leader:
                _dismiss()
        self.host = None


JUDGE: list[Process] = []  # one for all, at most
ONE_AT_A_TIME = threading.Lock()
atexit.register(lambda: _dismiss())


def _judged(**asked: Any) -> dict[str, Any]:
    """What the judge says next (`Judge.step`)."""
    with ONE_AT_A_TIME:
        if not JUDGE:
            JUDGE.append(start("judge"))
        if (said := JUDGE[0].ask(**asked)) is not None:
            return said
        _dismiss()
    words = "The judge has ended without a verdict: check the file once more."
    return {"verdict": dataclasses.asdict(Outcome("failed", "no-verdict", words))}


def _dismiss() -> None:
    while JUDGE:
        JUDGE.pop().close()


def run(exercise: Exercise, path: Path) -> Outcome:
    """Check the answer in `path`, in a process of its own. That process ends in any case."""
    with Checker() as checker:
        return checker.check(exercise, path)


def _read_lines(pipe: Any, lines: "queue.Queue[bytes]") -> None:
    """Each line of the pipe, and an empty one at its end. One that is too long comes in pieces."""
    with contextlib.suppress(OSError, ValueError), pipe:
        while line := pipe.readline(LINE):
            lines.put(line)
    lines.put(b"")


def _said(line: bytes, number: str) -> Any:
    """What a line says, if the number stands before it. Else None."""
    with contextlib.suppress(ValueError):
        if line.startswith(number.encode()):
            return json.loads(line[len(number) :])
    return None


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
    return dataclasses.asdict(Outcome("failed", name, words))


def _end_group(leader: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # Windows has no groups; or all of them have ended
        os.killpg(leader, signal.SIGKILL)


def _private() -> None:
    """No other process of this user can open this one's pipes, or read its memory: PR_SET_DUMPABLE, on Linux."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0)


# What follows runs in the host or in its child, or in the judge.


def main() -> None:
    """`python -m tests.exercises.machine.checker host`, or judge: reads a request a line, and writes a reply a line.

    `host 05 4 7` loads exercise 05, and forks a judge that reads from file 4, and writes to file 7.
    """
    _private()
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="triton")  # its interpreter's own, of rows that see no key
    role, *both = sys.argv[1:]
    if both:
        _load(find(both[0]))
        role = _forked(*map(int, both[1:]))
    channel = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(channel, False)
    if role == "judge":
        _judge(channel)
    if CAN_FORK:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what an answer left behind becomes a child of the host
    for line in sys.stdin:
        _host(channel, json.loads(line))


def _forked(requests: int, send: int) -> str:
    """Who this is from now on: the host; or the judge, which is no child of the host's."""
    role = "host"
    if (child := os.fork()) == 0:
        if os.fork():
            os._exit(0)
        role = "judge"
        os.dup2(requests, 0)
        os.dup2(send, 1)
    else:
        os.waitpid(child, 0)
    os.close(requests)
    os.close(send)
    return role


def _judge(channel: int) -> None:
    from tests.exercises.machine.judge import Judge

    judge = Judge()
    for line in sys.stdin:
        asked = json.loads(line)
        exercise, seed, count = find(asked["exercise"]), asked["seed"], asked["count"]
        said = judge.step(exercise, seed, count, asked.get("seen"), asked.get("doubt"))
        _write(channel, asked["number"], said)
        if "may" in said:
            judge.prepare(exercise, seed, count + 1)  # while the answer's process is at the case before


def _host(channel: int, asked: dict[str, Any]) -> None:
    """One check, up to the request that says `stop`."""
    exercise, path = find(asked["exercise"]), Path(asked["path"])
    _load(exercise)
    steps: Callable[[], runner.Seen] = functools.partial(runner.observe, exercise, path, asked["seed"])
    if asked["what"] == "ask":
        steps = functools.partial(_questions, exercise, path)
    number = [asked["number"]]
    with tempfile.TemporaryFile() as printed:
        end = lambda seen: _end(channel, number[0], seen)  # noqa: E731
        answer = (_in_a_child if CAN_FORK else _here)(steps, path, asked["wait"], printed, end)
        next(answer)
        for line in sys.stdin:
            asked = json.loads(line)
            number[0] = asked["number"]
            if "stop" in asked:
                break
            _write(channel, number[0], answer.send(asked["may"]))
        answer.close()
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - 4000))
        _write(channel, number[0], printed.read().decode(errors="replace").strip())


@functools.cache
def _load(exercise: Exercise) -> None:
    """Run the package's own function in one case: what it makes Python import is then there for all answers."""
    from tests.exercises.machine.judge import drawn, outcome_of

    outcome_of(exercise.load(), drawn(exercise.load(), "0")[0])


def _questions(exercise: Exercise, path: Path) -> runner.Seen:
    from tests.exercises import questions

    yield {}
    yield {"end": dataclasses.asdict(questions.ask(exercise, path))}


def _write(channel: int, number: str, said: Any) -> None:
    left = memoryview(f"{number}{json.dumps(said)}\n".encode())
    while left:
        left = left[os.write(channel, left) :]


def _end(channel: int, number: str, seen: dict[str, Any]) -> None:
    _write(channel, number, seen)
    os._exit(0)  # a rank may still compute


def _in_a_child(steps: Callable[[], runner.Seen], path: Path, wait: float, printed: Any, _: Any) -> runner.Seen:
    """As `steps()`, in a child of this process. In the end all that the child has started is ended."""
    number = secrets.token_hex()
    (requests, tell), (receive, send) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            os.close(tell)
            os.close(receive)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _limit()
            answer = _here(steps, path, wait, printed, functools.partial(_end, send, number))
            next(answer)
            while line := os.read(requests, 100):  # one request, since the next one waits for the reply
                _write(send, number, answer.send(float(line)))
        os._exit(1)
    os.close(requests)
    os.close(send)
    try:
        may = yield {}
        while True:
            with contextlib.suppress(OSError):  # it has ended
                os.write(tell, f"{may}\n".encode())
            may = yield _from_child(child, receive, number)
    finally:
        os.close(tell)
        os.close(receive)
        _end_group(child)
        _end_children()


def _from_child(child: int, receive: int, number: str) -> dict[str, Any]:
    """The child's next reply, or how it ended."""
    said, until = b"", time.monotonic() + SILENCE / 2
    while len(said) < LINE and time.monotonic() < until:
        if select.select([receive], [], [], 0.2)[0]:
            if not (part := os.read(receive, 2**20)):
                break
            *lines, said = (said + part).split(b"\n")
            for seen in (_said(line, number) for line in lines):
                if isinstance(seen, dict):
                    return seen
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # something else may hold the pipe
            break
    _end_group(child)
    _, status = os.waitpid(child, 0)
    return {"end": _ended(os.waitstatus_to_exitcode(status))}


def _end_children() -> None:
    """End what descends from this process: who loses a parent becomes its child."""
    while left := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, left):
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _limit() -> None:
    """Limits of the system for this process and those that it starts. It ends with its parent."""
    import ctypes
    import resource

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    for what, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, allowed = resource.getrlimit(what)
        if allowed == resource.RLIM_INFINITY or most < allowed:
            resource.setrlimit(what, (most, most))


def _here(
    steps: Callable[[], runner.Seen], path: Path, wait: float, printed: Any, end: Callable[[dict[str, Any]], None]
) -> runner.Seen:
    """As `steps()`, in this process. `end` is called, from another thread, if a case takes too long."""
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    answer, start, until = steps(), time.process_time(), [math.inf]
    next(answer)
    threading.Thread(target=_watch, args=(path, until, wait, end), daemon=True).start()
    may = yield {}
    while True:
        until[0] = start + HARD * may
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (int(until[0]) + 3, hard))  # after `_watch` had its turn
        seen = answer.send(may)
        until[0] = math.inf
        with contextlib.suppress(Exception):  # the answer may have closed it
            sys.stdout.flush()
        may = yield seen


def _watch(path: Path, until: list[float], wait: float, end: Callable[[dict[str, Any]], None]) -> None:
    """End a case that computes, or waits, without an end: for what no timer interrupts.

    until: what this process may have computed by then; without an end while nothing is asked.
    """
    seen, moved = time.process_time(), time.monotonic()
    while True:
        time.sleep(0.1)
        computed = time.process_time()
        if computed - seen > IDLE_SECONDS or until[0] == math.inf:
            seen, moved = computed, time.monotonic()
        after = f"After {computed:.0f} seconds of computing" if computed > until[0] else ""
        if time.monotonic() - moved > wait:
            after = f"For {wait:g} seconds it hardly computed, and"
        if after:
            end({"end": dataclasses.asdict(runner.endless(after, runner.places(path)))})


if __name__ == "__main__":
    main()
