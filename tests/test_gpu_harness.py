"""`make gpu` where there is no GPU: the harness, and every benchmark and test behind it, small, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from tests.bench import gpu, gpu_parts

pytestmark = [
    pytest.mark.pretend,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU `make gpu` itself shows that it works"),
]
ROOT = Path(__file__).parents[1]


def harness(*arguments):
    command = [sys.executable, "-m", "tests.bench.gpu", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


# The report.


def test_a_figure_is_measured_once_and_kept_at_once(tmp_path):
    report, calls = gpu.Report(tmp_path, "flash"), []
    assert report.measure("a", lambda: calls.append(1) or {"rate": 2.0}) == {"rate": 2.0}
    again = gpu.Report(tmp_path, "flash")  # as after a process that was killed
    assert again.measure("a", lambda: calls.append(2)) == {"rate": 2.0} and calls == [1]
    assert not again.mine["done"] and gpu.Report(tmp_path, "memory").figures == {}
    machine = json.loads((tmp_path / "results.json").read_text())["machine"]
    assert machine["card"] == "CPU" and machine["torch"] == torch.__version__ and machine["cores"] > 0


def test_what_cannot_be_measured_is_said_and_tried_again(tmp_path, capsys):
    report = gpu.Report(tmp_path, "flash")
    assert report.measure("a", lambda: 1 / 0) is None
    assert "a: division by zero" in capsys.readouterr().out
    report.finish()
    lines, complete = gpu.table(tmp_path, ["flash"])
    assert lines == ["flash: a"] and not complete
    again = gpu.Report(tmp_path, "flash")
    figure = {"rate": 2 / 3, "held": {"total": 5}, "curve": {"total": [1, 2]}, "list": [1]}
    assert again.measure("a", lambda: figure) == figure
    again.finish()
    assert gpu.table(tmp_path, ["flash"]) == (["flash: done", "    a: rate 0.6667; held total 5"], True)


# The command.


def test_a_part_alone_and_once_more(tmp_path):
    first = harness("--tiny", "--part", "flash", "--output", tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "\nflash: done\n    matmul: " in first.stdout[-900:]
    figures = json.loads((tmp_path / "results.json").read_text())["parts"]["flash"]["figures"]
    for name in ("flash", "MATH"):
        assert figures["d 64, causal, N 32"][name].keys() == {"forward", "backward", "memory"}
    second = harness("--tiny", "--part", "flash", "--output", tmp_path)
    assert second.returncode == 0 and "== flash: done before" in second.stdout
    assert (tmp_path / "log.txt").read_text() == first.stdout + second.stdout


def test_a_part_that_takes_too_long_is_stopped_with_what_it_has_started_and_missed(tmp_path, monkeypatch):
    """The part `tests` starts pytest, which writes its report when it ends."""
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--junitxml={tmp_path}/ended.xml")
    answer = harness("--tiny", "--part", "tests", "--limit", "4", "--output", tmp_path)
    assert answer.returncode == 1 and not (tmp_path / "ended.xml").exists()
    assert "tests: stopped after its time" in answer.stdout and "not all of it was measured" in answer.stdout


def test_a_folder_of_another_card_or_with_a_cut_file_is_refused(tmp_path):
    for text, words in (
        ('{"machine": {"card": "H200"}, "parts": {}}', "has the figures of H200"),
        ("{", "no results.json"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(SystemExit, match=words):
            gpu.Report(tmp_path, "flash")


def test_without_a_gpu_it_says_so_in_a_line():
    answer = harness("--part", "flash")
    assert answer.returncode == 1 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "--tiny" in answer.stderr


# The parts.


@pytest.mark.parametrize("part, figures", [("memory", 10), ("train", 6), ("xray", 1), ("notebooks", 1)])
def test_a_part_measures_all_that_it_has(part, figures, tmp_path):
    report = gpu.Report(tmp_path, part)
    getattr(gpu_parts, part)(report, tiny=True)
    assert not report.missing and len(report.figures) == figures


@pytest.mark.parametrize("options, said", [("--collect-only", "tests collected"), ("-k no_such_test", None)])
def test_the_tests_of_a_gpu_say_how_they_ended(options, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    report = gpu.Report(tmp_path, "tests")
    gpu_parts.tests(report, tiny=True)
    assert said in report.figures["tests"] if said else report.missing == ["tests"]


def test_each_cell_of_a_notebook_runs_and_what_failed_is_named(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ("1 / 0", "2 + 3", "assert False, 'no card'")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    with pytest.raises(RuntimeError, match=r"cell \[0\] ZeroDivisionError: .*; cell \[2\] AssertionError: no card"):
        gpu_parts.run_notebook(tmp_path / "a.ipynb", tmp_path)
    assert nbformat.read(tmp_path / "a.ipynb", 4).cells[1].outputs[0].data["text/plain"] == "5"
