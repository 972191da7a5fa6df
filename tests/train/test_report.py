"""The report: right numbers in the right columns, boxes to scale, nothing half-written."""

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from minizero import pictures
from minizero.train import report
from tests.support.helpers import slow

NAMES = ["DDP", "Zero1", "Zero2", "Zero3"]
STATES = ["parameters", "gradients", "optimizer"]
CATEGORIES = [*STATES, "activations", "temporary", "communication"]
MIB = 2**20


def make_results(stages=(0, 1, 2, 3), world_size=4):
    """A made-up run in which no two numbers of a stage are equal."""
    runs = []
    for stage in stages:
        ranks = []
        for rank in range(world_size):
            persistent = {name: (10 * place + 8 - stage + rank) * MIB for place, name in enumerate(STATES, 1)}
            persistent["activations"] = 4  # a loss, too small for a row or a box
            peak = {name: (7 * place + stage + rank) * MIB for place, name in enumerate(CATEGORIES, 1)}
            peak["total"], persistent["total"] = (100 + stage + rank) * MIB, sum(persistent.values())
            ranks.append({"persistent": persistent, "peak": peak})
        predicted = {name: (10 * place + 6) * MIB // (stage + 1) for place, name in enumerate(STATES, 1)}
        curve: dict = {name: [place * MIB] * 40 for place, name in enumerate(CATEGORIES, 1)}
        curve["activations"] = [step * (4 - stage) * MIB for step in [*range(20), *reversed(range(20))]]
        curve["total"] = [sum(values) for values in zip(*curve.values())]
        curve["phase"] = ["between"] * 2 + ["forward"] * 16 + ["backward"] * 19 + ["optimizer"] * 3
        run = {"stage": stage, "name": NAMES[stage], "losses": [4.0, 3.0, 2.5 + stage / 8], "ranks": ranks}
        run |= {"step_seconds": 0.5 + stage, "bytes_sent": (60 + stage) * MIB, "curve": curve}
        run |= {"bytes_sent_formula": (70.5 + stage) * MIB}
        runs.append(run | {"predicted": {**predicted, "total": sum(predicted.values())}})
    machine = {"cpu": "Some [cpu]", "cores": 8, "python": "3.12.1", "torch": "2.11.0", "device": "cpu"}
    config = {"width": 192, "layers": 6, "dtype": "float32"}
    return {"machine": machine, "config": config, "world_size": world_size, "n_parameters": 2_745_600, "runs": runs}


def printed_lines(results, width=80):
    output = io.StringIO()
    report.print_table(results, Console(file=output, width=width))
    return output.getvalue().splitlines()


def test_table_puts_each_number_in_its_column():
    results = make_results()
    lines = printed_lines(results)
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert lines[0].startswith("Some [cpu] (8 cores), Python 3.12.1, torch 2.11.0, device cpu")
    headers = [line.split() for line in lines]
    assert ["category", "stage", "measured", "predicted"] in headers
    assert ["stage", "measured,", "MiB", "predicted,", "MiB", "measured", "/", "DDP's", "loss"] in headers

    rows = [line.split() for line in lines]
    last = {run["name"]: run["ranks"][-1] for run in results["runs"]}  # the last rank holds most
    for run in results["runs"]:
        name, held = run["name"], last[run["name"]]["persistent"]
        for category in [*STATES, "total"]:
            numbers = [f"{number / MIB:.2f}" for number in (held[category], run["predicted"][category])]
            assert [category, name, *numbers] in rows
        sent = [f"{run['bytes_sent'] / MIB:.2f}", f"{run['bytes_sent_formula'] / MIB:.2f}"]
        seconds = [f"{run['step_seconds']:.3f}", f"{run['step_seconds'] / 0.5:.2f}"]  # DDP took half a second
        assert [name, *sent, *seconds, f"{run['losses'][-1]:.6f}"] in rows
    assert ["category", *NAMES] in rows
    for category in CATEGORIES:
        assert [category, *(f"{last[name]['peak'][category] / MIB:.2f}" for name in NAMES)] in rows
    assert ["joint", "total", *(f"{last[name]['peak']['total'] / MIB:.2f}" for name in NAMES)] in rows


def test_what_was_not_measured_is_a_dash_and_says_why():
    results = make_results()
    for run in results["runs"]:
        run |= {"losses": [5.5], "step_seconds": None}
    lines = printed_lines(results)
    assert ["Zero2", "62.00", "72.50", "-", "-", "5.500000"] in [line.split() for line in lines]
    assert max(map(len, lines)) <= 80
    assert any("a ledger watched" in line for line in lines) and any("send half" in line for line in lines)
    results["runs"][0]["steps_before"] = 9  # resumed: its one step is the tenth
    assert list(pictures.draw_losses(results).axes[0].lines[0].get_xdata()) == [10]
    assert not any("send half" in line for line in printed_lines(results))
    alone = printed_lines(make_results(stages=(3,)))  # no DDP to compare with
    assert ["Zero3", "63.00", "73.50", "3.500", "-", "2.875000"] in [line.split() for line in alone]


@pytest.mark.parametrize(("stages", "world_size"), [((0, 1, 2, 3), 4), ((3,), 1), ((0, 2), 8)])
def test_boxes_are_as_high_as_their_bytes_and_stand_at_their_place(stages, world_size):
    results = make_results(stages, world_size)
    (axes,) = pictures.draw_boxes(results).axes
    pieces = [bars for bars in axes.containers if bars.get_label() in STATES]
    drawn = [(bars.get_label(), bar.get_y() * MIB, bar.get_height() * MIB) for bars in pieces for bar in bars]
    expected, whole, below = [], {}, 0
    for name, first in {"parameters": 3, "gradients": 2, "optimizer": 1}.items():  # the stage that begins to cut it
        held = {run["stage"]: [rank["persistent"][name] for rank in run["ranks"]] for run in results["runs"]}
        whole[name] = max(sum(its) if stage >= first else max(its) for stage, its in held.items())
        for stage, its in held.items():
            for rank, height in enumerate(its):  # above the pieces of the ranks before it
                expected.append((name, below + (sum(its[:rank]) if stage >= first else 0), height))
        below += whole[name]
    for found, piece in zip(sorted(drawn), sorted(expected), strict=True):
        assert found[0] == piece[0] and found[1:] == pytest.approx(piece[1:])
    assert len({bar.get_x() for bars in pieces for bar in bars}) == len(stages) * world_size
    outlines = [bar.get_height() * MIB for bars in axes.containers if bars not in pieces for bar in bars]
    assert sorted(set(outlines)) == pytest.approx(sorted(set(whole.values())))


def test_curves_mark_the_measured_peak_and_the_predicted_total():
    results = make_results()
    panels = pictures.draw_curves(results).axes
    assert len({panel.get_ylim() for panel in panels}) == len({panel.get_xlim() for panel in panels}) == 1
    for panel, run in zip(panels, results["runs"], strict=True):
        peak, predicted = panel.lines
        highest = max(run["curve"]["total"]) / MIB
        words = {text.get_text().strip(" ▸◂") for text in panel.texts}
        assert words == {"forward", "backward", "optimizer step", f"peak {highest:.2f} MiB"}
        assert np.unique(predicted.get_ydata()) == [run["predicted"]["total"] / MIB]
        assert np.unique(peak.get_ydata()) == [highest]
        assert predicted.get_color() not in [peak.get_color(), *pictures.COLORS.values()]


class Sample(dict):
    phase = "forward"


def test_a_ledgers_curve_goes_on_the_axes_that_it_is_given():
    samples = [Sample(parameters=2 * MIB, activations=step * MIB, total=(2 + step) * MIB) for step in range(5)]
    axes = Figure().subplots()
    assert pictures.plot_curve(samples, axes) is axes
    assert {"forward", "peak 6.00 MiB"} == {text.get_text() for text in axes.texts}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["parameters", "activations"]


def test_a_marked_place_names_both_of_its_sides():
    axes = Figure().subplots()
    axes.set_xlim(0, 10)
    pictures.mark_place(axes, 4, "before", "after")
    assert list(axes.lines[0].get_xdata()) == [4, 4]
    before, after = (text.get_window_extent() for text in axes.texts)
    assert before.x1 < axes.transData.transform((4, 0))[0] < after.x0
    assert [text.get_text() for text in axes.texts] == ["before", "after"]


def test_losses_name_the_largest_difference():
    title = pictures.draw_losses(make_results()).get_suptitle()
    assert title.endswith("largest difference between stages: 0.375")
    assert "difference" not in pictures.draw_losses(make_results(stages=(3,))).get_suptitle()


@pytest.mark.parametrize(
    ("stages", "world_size"), [((3,), 1), *slow(((0, 1, 2, 3), 4), ((0, 2), 8), mark=pytest.mark.slow)]
)
def test_every_axis_is_labelled_and_the_legend_hides_nothing(stages, world_size):
    results = make_results(stages, world_size)
    for draw in (pictures.draw_curves, pictures.draw_boxes, pictures.draw_losses):
        (figure := draw(results)).draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        assert legend.x0 >= 0 and legend.y0 >= 0 and legend.x1 <= figure.bbox.x1
        for axes in figure.axes:
            assert axes.get_xlabel() and ("MiB" in axes.get_ylabel() or "nats" in axes.get_ylabel())
            assert not axes.get_tightbbox().overlaps(legend)


@pytest.mark.slow
def test_the_json_alone_draws_the_same_pictures_again(tmp_path, monkeypatch, capsys):
    results = make_results()
    paths = report.save(results, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["results.json", "curves.png", "boxes.png", "losses.png"]
    assert json.loads(paths[0].read_text()) == results
    before = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") and len(content) < 300_000 for content in before[1:])
    for path in paths[1:]:
        path.unlink()
    monkeypatch.setattr("sys.argv", ["report", str(paths[0])])
    report.main()
    assert [path.read_bytes() for path in paths] == before
    assert "joint total" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "no JSON", "[1]", "{}", '{"runs": [{}], "machine": {}, "config": {}}'])
def test_a_file_that_is_no_run_is_one_line(content, tmp_path, monkeypatch, capsys):
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "r.json")])
    assert report.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "r.json" in error


@pytest.mark.slow
def test_a_failed_save_leaves_no_partial_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        report.save(make_results(), tmp_path / "file")
    old = {path: path.read_bytes() for path in report.save(make_results(), tmp_path / "folder")}
    write = Path.write_bytes

    def disk_full(path, content):
        write(path, content[: len(content) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="cannot write .*results.json: no space"):
        report.save(make_results(stages=(3,)), tmp_path / "folder")
    assert {path: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == old
    assert (tmp_path / "file").read_text() == "in the way"


def drawn(*phases):
    """The curve of a step: of each phase so many samples."""
    samples = [Sample(parameters=MIB, total=MIB) for _, count in phases for _ in range(count)]
    for sample, phase in zip(samples, (phase for phase, count in phases for _ in range(count))):
        sample.phase = phase
    return pictures.plot_curve(samples, Figure(figsize=(8, 4)).subplots())


def test_a_phase_that_comes_again_is_named_once_and_names_keep_clear_of_each_other():
    """Four micro-batches, each with a narrow forward and a wide backward, then the step."""
    axes = drawn(*[("forward", 10), ("backward", 25)] * 4, ("optimizer", 20))
    names = [text for text in axes.texts if not text.get_text().startswith("peak")]
    assert sorted(text.get_text().strip(" ▸◂") for text in names) == ["backward", "forward", "optimizer step"]
    axes.figure.canvas.draw()
    boxes = sorted((text.get_window_extent().x0, text.get_window_extent().x1) for text in names)
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(boxes))
    # A name wider than its phase stands beside it and points at it.
    places = {text.get_text(): text.xy[0] for text in drawn(("forward", 40), ("backward", 55), ("optimizer", 5)).texts}
    assert places["optimizer step ▸"] == 95 and places["forward"] == 0 and places["backward"] == 40


def test_mfu_is_the_models_flops_over_what_the_cards_could_do():
    """By PaLM's formula: a token takes 6 FLOPs for each parameter of a product, and 12 · layers · width · tokens."""
    results = make_results(stages=(0, 3)) | {"world_size": 4, "cards": 2}
    results["config"] = {"layers": 2, "width": 64, "heads": 4, "sequence_length": 128, "vocabulary": 256}
    results["config"] |= {"batch_size": 3, "dtype": "bfloat16"}
    results["runs"][1]["step_seconds"] = None
    assert report.mfu(results) == [], "no card"
    results["machine"]["device"] = "NVIDIA H200"
    results["runs"][0]["step_seconds"] = 1e-6
    flops = 4 * 3 * 128 * (6 * (12 * 2 * 64**2 + 256 * 64) + 12 * 2 * 64 * 128)
    (line,) = report.mfu(results)
    assert line == f"MFU, of 989 TFLOP/s by the data sheet: DDP {flops / 1e-6 / 2 / 989e12:.1%}"
    assert line in "\n".join(printed_lines(results))
    results["machine"]["device"] = "NVIDIA H200 NVL"
    assert report.mfu(results) == [], "another peak, which is not known"
