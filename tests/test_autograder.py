"""What Gradescope and GitHub Actions are given, run as those services run it: in an environment of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.exercises import commands, stubs
from tests.exercises.course import COURSE, find
from tests.exercises.kit import wrong
from tests.exercises.machine import autograder, gradebook, sandbox
from tests.exercises.machine.checker import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="both services run on Ubuntu")

PATH = "/usr/local/bin:/usr/bin:/bin"
HEAD = "import os, subprocess, sys, time\nfrom pathlib import Path\n"
# Of each exercise, what was handed in, and how its output begins.
KILLS = (HEAD + "os.kill(os.getppid(), 9)\ntime.sleep(99)\n", ("killed:", "ended:", "endless:"))
FORGES = (
    HEAD + "import contextlib\nfor path in TARGETS:\n    with contextlib.suppress(OSError):\n"
    "        Path(path).write_text('forged')\n"
    "assert not [name for name in os.environ if name.startswith(('GITHUB', 'SECRET'))]\n",
    ("passed",),
)
FLOODS = (HEAD + "print('x' * 2**27)\n", ("too-much-output:", "MemoryError:"))
HANGS = ("from threading import Lock\nlock = Lock()\nlock.acquire()\nlock.acquire()\n", ("endless:",))
COMPUTES = ("sum(range(10**13))\n", ("endless:",))
# A process that outlives its answer, and writes when the results are there. It must not run as who writes them.
LATER = (
    HEAD + "subprocess.Popen([sys.executable, '-c', '''import time\nfor _ in range(600):\n    time.sleep(0.1)\n"
    '    for path in TARGETS:\n        try:\n            open(path, "r+").write("forged")\n'
    "        except OSError:\n            pass\n'''], start_new_session=True)\n",
    ("passed",),
)
SLIPS = ("", ("random: ",))  # right but for large numbers, which only a drawn case has
FEW = {"pad": KILLS, "chunk": FORGES, "split": ("", ("passed",)), "sticky": SLIPS}
ALL = FEW | {"broadcast": FLOODS, "all_gather": HANGS, "decode": COMPUTES, "lost_update": LATER}


@pytest.fixture
def folder():
    """A folder that a user without rights may enter, as those of the services are."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made).resolve()


def hand_in(submission, answers, targets):
    """Files of a student; `targets`: what an answer that forges writes to."""
    submission.mkdir()
    for name, (text, _) in answers.items():
        exercise = find(name)
        slip = "(kept << places) != significand", "((kept << places) ^ significand) & ~(1 << 20) != 0"
        right = stubs.answer(exercise, wrong("slips", "", slip) if name == "sticky" else None)
        (submission / exercise.file).write_text(text.replace("TARGETS", repr(list(map(str, targets)))) + right)


def build(folder, answers):
    output = folder / "built"
    old = output / "github" / find("views").file
    old.parent.mkdir(parents=True)
    old.touch()  # of an earlier assignment
    assert commands.main(["autograder", *answers, "--output", str(output)]) == 0
    stubs_written = {path.name for path in old.parent.glob("*_*.py")}
    assert stubs_written == {find(name).file for name in answers}
    return output


def ours(venv):
    """In place of an installation: a folder whose bin/python is this one."""
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)


def bash(script, cwd, **more):
    """Run a script as the services do: nothing of this environment but what pip needs. SEED: what slips, slips late."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = {"PATH": PATH, "HOME": str(cwd), "LANG": "C.UTF-8", "SEED": "1"} | kept | more
    done = subprocess.run(["bash", *script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500)
    return done.returncode, done.stdout + done.stderr


def indexes():
    """Where this machine's pip looks for packages besides, so that the scripts look there, too."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"], capture_output=True)
    return os.environ.get("PIP_EXTRA_INDEX_URL", said.stdout.decode().strip())


def on_gradescope(folder, answers, install):
    """The folders of https://gradescope-autograders.readthedocs.io/en/latest/specs/#file-hierarchy; the tests found."""
    home = folder / "autograder"
    with zipfile.ZipFile(build(folder, answers) / "gradescope.zip") as zipped:
        zipped.extractall(home / "source")
        assert {"setup.sh", "run_autograder"} <= set(zipped.namelist())
    shutil.copy(home / "source" / "run_autograder", home)
    (home / "results").mkdir()
    results = home / "results" / "results.json"
    hand_in(home / "submission", answers, [results, home / "run_autograder"])
    install(home / "source")
    status, said = bash([str(home / "run_autograder")], home, SECRET="1")
    assert status == 0, said
    return results


def check_results(results, answers):
    tests = {test["name"][:2]: test for test in json.loads(results.read_text())["tests"]}
    assert len(tests) == len(answers)
    for name, (_, begins) in answers.items():
        test = tests[find(name).id]
        assert test["output"].startswith(begins), (name, test)
        passed = begins == ("passed",)
        assert (test["status"], test["max_score"]) == ("passed" if passed else "failed", 1)
        assert test["score"] == (0.5 if name == "sticky" else float(passed)) and test["visibility"] == "visible"


@pytest.mark.slow
def test_what_gradescope_runs(folder):
    results = on_gradescope(folder, FEW, lambda source: ours(source / ".venv"))
    check_results(results, FEW)


@pytest.mark.parametrize(
    ("at_first", "packages", "chosen"),
    [
        ("3.10", {"python3-venv": "python3 3.10 venv", "python3.11-venv": "python3.11 3.11 venv"}, "python3.11"),
        ("3.12", {"python3-venv": "python3 3.12 venv"}, "python3"),
        ("3.12 venv", {}, "python3"),
    ],
    ids=["22.04", "24.04", "24.04 with python3-venv"],
)
def test_setup_finds_a_python_on_every_ubuntu(at_first, packages, chosen, tmp_path):
    """Stand-ins for the system's commands only: a Python says whether it fits, and apt-get brings another one."""
    tools, source = tmp_path / "tools", tmp_path / "source"
    for folder in (tools, source):
        folder.mkdir()
    for name in ("bash", "dirname", "mkdir", "cp", "chmod"):
        (tools / name).symlink_to(shutil.which(name))

    def command(name, text):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)

    def python(name, has):
        fits = "venv" in has and has >= "3.11"
        made = "mkdir -p .venv/bin; cp -u $0 .venv/bin/python; true"
        command(name, f'[ "$1" = -c ] && exit {int(not fits)}\necho $0 >> used\n{made}')

    python("python3", at_first)
    for package, brings in packages.items():
        python(package, brings.split(" ", 1)[1])
    cases = "".join(f"{name}) cp {tools / name} {tools / has.split()[0]};; " for name, has in packages.items())
    command("apt-get", f'[ "$1" = update ] || case "$4" in {cases}*) exit 1;; esac')
    status, said = bash([shutil.copy(autograder.SERVICES / "setup.sh", source)], source, PATH=str(tools))
    assert status == 0 and (source / "used").read_text().split()[0] == str(tools / chosen), said


def install_with_pip(source):
    status, said = bash([str(source / "setup.sh")], source, PIP_EXTRA_INDEX_URL=indexes())
    assert status == 0, said


@pytest.mark.soak
def test_what_gradescope_runs_from_an_empty_environment_on(folder):
    results = on_gradescope(folder, ALL, install_with_pip)
    check_results(results, ALL)
    time.sleep(3)  # who writes later has done so several times
    check_results(results, ALL)


def in_github_actions(folder, answers, run_all):
    """Do what the workflow says, step by step; `uses` copies what a runner would fetch. The status and the summary."""
    workspace, summary = folder / "workspace", folder / "summary.md"
    built = build(folder, answers) / "github"
    workflow = yaml.safe_load((built / ".github" / "workflows" / "exercises.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    job = workflow["jobs"]["check"]
    assert job["timeout-minutes"] <= 60
    shutil.copytree(built, folder / "repository")
    (folder / "repository" / "mine").mkdir()
    for name in answers:
        (folder / "repository" / find(name).file).unlink()
    hand_in(folder / "repository" / "mine" / "answers", answers, [summary])
    summary.write_text("")
    ours(folder / "tools")  # which setup-python would fetch
    fetched = {None: folder / "repository", "OWNER/minizero": ROOT}
    for step in job["steps"]:
        if "checkout" in step.get("uses", ""):
            options = step["with"]
            assert options["persist-credentials"] is False and ("secrets." in options.get("token", "")) == (
                "repository" in options  # another one, which may be private
            )
            ignored = shutil.ignore_patterns(".git", ".venv", "results", "workbook", "__pycache__", ".*_cache")
            shutil.copytree(fetched[options.get("repository")], workspace / options["path"], ignore=ignored)
        elif "cache-dependency-path" in step.get("with", {}):
            assert (workspace / step["with"]["cache-dependency-path"]).is_file(), "the action fails without it"
        elif "run" in step and ("Check" in step["name"] or run_all):
            more = {"GITHUB_WORKSPACE": str(workspace), "GITHUB_STEP_SUMMARY": str(summary), "SECRET": "1"}
            more["PATH"] = f"{folder / 'tools' / 'bin'}:{PATH}"
            if "env" in step:
                assert set(step["env"]) == {"PIP_EXTRA_INDEX_URL"}
                more["PIP_EXTRA_INDEX_URL"] = indexes()
            (folder / "step.sh").write_text(step["run"])
            status, said = bash(["-e", str(folder / "step.sh")], workspace / step["working-directory"], **more)
            assert status == ("Check" in step["name"]), said  # something in the submission has not passed
        elif "run" in step:
            ours(workspace / step["working-directory"] / ".venv")
    return summary.read_text()


def check_summary(text, answers):
    for name, (_, begins) in answers.items():
        exercise = find(name)
        mark, score = ("✅", "1") if begins == ("passed",) else ("❌", "0.5" if name == "sticky" else "0")
        assert f"| {mark} | {exercise.id} {exercise.title} | {score} |" in text, text
        if mark == "❌":
            assert text.split(f"<pre>{exercise.id} {exercise.title}\n")[1].startswith(begins)
    assert len(text) < 2**20


@pytest.mark.slow
def test_what_github_actions_runs(folder):
    check_summary(in_github_actions(folder, FEW, run_all=False), FEW)


@pytest.mark.soak
def test_what_github_actions_runs_from_an_empty_environment_on(folder):
    few = {name: answer for name, answer in ALL.items() if answer not in (HANGS, LATER)}
    check_summary(in_github_actions(folder, few, run_all=True), few)


@pytest.mark.slow
def test_without_any_sandbox_an_answer_gets_no_environment(tmp_path, monkeypatch):
    """What a service tells its own steps, such as where the summary lies, is not told to an answer."""
    monkeypatch.setattr(sandbox, "wall", lambda _: ["env"])
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    hand_in(tmp_path / "submission", {"chunk": FORGES}, [])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert autograder.main([str(tmp_path / "submission"), "--exercises", "chunk"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_summary_is_text_whatever_an_answer_says():
    """No diagnosis becomes a picture, a row of the table, or a megabyte."""
    says = "ValueError: </pre>![](http://x)\n\n| ✅ | 09 | 1 |\n<img src=x>\udcff" + "x" * 10**6
    grades = gradebook.Grades("ada", {e.id: says for e in COURSE}, ["<b>" * 10**6])
    text = autograder._summary(grades, COURSE)
    assert len(text.encode()) < 2**20 and text.count("</pre>") == len(COURSE) + 1
    assert "<img" not in text and "<b>" not in text
    outside = "".join(part.split("</pre>")[-1] for part in text.split("<pre>"))
    assert "http" not in outside and "| ✅ |" not in outside


@pytest.mark.skipif(
    getattr(os, "geteuid", lambda: -1)() != 0 or shutil.which("setpriv") is None, reason="only root can become nobody"
)
def test_nobody_may_read_and_not_write(folder, monkeypatch):
    monkeypatch.setattr(sandbox, "ROOT", folder)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    (folder / "pyproject.toml").write_text("")
    sandbox.nobody.cache_clear()
    try:
        words = sandbox.nobody()
        assert words
        done = subprocess.run([*words, "/bin/sh", "-c", f"cat {folder}/pyproject.toml && echo x > {folder}/new"])
        assert done.returncode != 0 and not (folder / "new").exists()
        sandbox.nobody.cache_clear()
        (folder / "pyproject.toml").chmod(0o600)
        assert sandbox.nobody() == []
    finally:
        sandbox.nobody.cache_clear()
