"""python -m tests.bench.gpu_tests: the tests of tests/gpu, on several cores where pytest-xdist is there."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

from notebooks.tools.card import CUDA
from tests.bench.gpu_tools import main


def run_tests(folder):
    """Run them, and count: {tests, seconds, skipped by file, names of those that failed}."""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis") if not importlib.util.find_spec(name)]
    if missing:
        raise RuntimeError(f"{sys.executable} has no {', '.join(missing)}: install, or name another by GPU_PYTHON")
    found = folder / "tests.xml"
    found.unlink(missing_ok=True)
    workers = ["-n", str(min(12, os.cpu_count()))] if CUDA and importlib.util.find_spec("xdist") else []
    options = ["-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", f"--junitxml={found}", *workers]
    environment = os.environ | ({} if CUDA else {"GPU_TESTS_ON": "cpu"})
    subprocess.run([sys.executable, "-m", "pytest", "tests/gpu", *options], env=environment)
    suite = ElementTree.parse(found).getroot().find("testsuite")
    failed = [f"{case.get('classname')}.{case.get('name')}" for case in suite.iter("testcase") if is_red(case)]
    skipped = Counter(case.get("classname").split(".")[-1] for case in suite.iter("testcase") if is_skipped(case))
    numbers = {"tests": int(suite.get("tests")), "seconds": float(suite.get("time"))}
    return numbers | {"failed": failed, "skipped": dict(skipped)}


def is_skipped(case):
    return case.find("skipped") is not None


def is_red(case):
    return case.find("failure") is not None or case.find("error") is not None


def run(report, tiny):
    """Run, and return the lines of the short table. What is red is run again next time."""
    found = report.measure("tests", lambda: run_tests(report.path.parent))
    if found is None:
        return ["not run"]
    if found["failed"]:
        report.missing += report.figures.pop("tests")["failed"]
    skipped = sum(found["skipped"].values())
    passed = found["tests"] - skipped - len(found["failed"])
    return [f"{passed} passed, {len(found['failed'])} failed, {skipped} skipped in {found['seconds']:.0f} s"]


if __name__ == "__main__":
    main("tests", __doc__, run)
