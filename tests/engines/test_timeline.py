"""What a rank does when, and what it holds meanwhile: recorded truly, drawn, and written as a trace."""

import functools
import json
import time

import matplotlib
import pytest
import torch

from minizero import GPT, Zero3, all_reduce
from minizero.engines.timeline import Timeline
from minizero.grid import STATES, draw_text, step_by_step
from minizero.grid import main as grid
from minizero.pictures.timeline import LANES, Event, chrome_trace, plot_timeline
from tests.support.helpers import SMALL, STAGES, batch, run
from tests.support.small_models import Blocks, on_ranks, vectors

matplotlib.use("Agg")
BLOCKS = [f"blocks.{i}" for i in range(3)]


def record(comm, stage, **options):
    """The events of the second step, and whether the engine is afterwards as it was."""
    model = stage(GPT(SMALL), comm, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with Timeline(model, optimizer) as timeline:
            model(*batch(comm.rank, size=2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = len(timeline.events)
    model(*batch(comm.rank, size=2)).backward()
    all_reduce(torch.ones(1), comm)
    return timeline.events, len(timeline.events) == seen and not set(vars(model)) & {"gather", "reduce", "release"}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_every_collective_and_every_computation_is_there_once(prefetch):
    for rank, (events, clean) in enumerate(run(2, record, Zero3, prefetch=prefetch)):
        assert clean
        names = {lane: [e.name for e in sorted(events, key=lambda e: e.start) if e.lane == lane] for lane in LANES}
        assert names["all-gather"] == ["root", *BLOCKS, *reversed(BLOCKS)]
        assert names["reduce-scatter"] == [*reversed(BLOCKS), "root"]
        assert names["optimizer"] == ["optimizer step"]
        computed = list(dict.fromkeys(names["compute"]))
        both = [f"forward {name}" for name in BLOCKS] + [f"backward {name}" for name in reversed(BLOCKS)]
        assert [name for name in computed if "blocks" in name] == both
        assert {event.rank for event in events} == {rank} and all(event.start <= event.end for event in events)
        compute = sorted((e.start, e.end) for e in events if e.lane in ("compute", "optimizer"))
        assert all(one[1] <= other[0] for one, other in zip(compute, compute[1:])), "one thing at a time"


def overlap(events):
    """Seconds that collectives and computation of a rank ran beside each other."""
    compute = [e for e in events if e.lane == "compute"]
    moving = [e for e in events if e.lane in ("all-gather", "reduce-scatter")]
    return sum(max(0.0, min(c.end, m.end) - max(c.start, m.start)) for c in compute for m in moving)


def test_only_prefetch_overlaps():
    assert overlap(run(2, record, Zero3, prefetch=0)[0][0]) == 0
    # Beside busy processes the two lanes of a small step may miss each other, but not each time.
    assert any(overlap(run(2, record, Zero3, prefetch=1)[0][0]) > 0 for _ in range(20))


def test_to_wait_for_the_last_reduction_is_no_computation():
    def work(comm):
        model, spans = Zero3(GPT(SMALL), comm), []
        average = model.average

        def slow(unit, gradient):
            start = time.perf_counter()
            time.sleep(0.4 * (unit.name == "root"))
            spans.append(Event(0, "reduce-scatter", unit.name, start, time.perf_counter()))
            return average(unit, gradient)

        model.average = slow
        with Timeline(model) as timeline:
            model(*batch(comm.rank, size=2)).backward()
        return overlap([spans[-1], *(event for event in timeline.events if event.lane == "compute")])

    assert all(seconds < 0.2 for seconds in run(2, work))


def use_twice(model):
    model.forward = lambda x: (model.blocks[0](x) * model.blocks[0](2 * x)).sum()  # both uses end together


@on_ranks([functools.partial(Zero3, prefetch=0)], make=lambda: Blocks(use_twice))
def test_no_computation_is_recorded_after_the_last_use_of_a_unit_that_is_used_twice(model, comm):
    with Timeline(model) as timeline:
        model(vectors(0)).backward()
    assert (timeline.in_use, timeline.computing) == ([], None)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_can_be_recorded(stage):
    events, clean = run(2, record, stage)[1]
    lanes = {event.lane for event in events}
    assert clean and {"compute", "optimizer"} < lanes and lanes & {"all-reduce", "reduce-scatter"}


def test_the_trace_and_the_drawing_hold_the_same_bars():
    events = sum((found[0] for found in run(2, record, Zero3)), [])
    trace = json.loads(chrome_trace(events))["traceEvents"]
    bars = [entry for entry in trace if entry["ph"] == "X"]
    assert len(bars) == len(events)
    first = min(event.start for event in events)
    for bar, event in zip(bars, events, strict=True):
        assert (bar["pid"], bar["cat"]) == (event.rank, event.lane)
        assert bar["ts"] == pytest.approx(1e6 * (event.start - first))
        assert bar["dur"] == pytest.approx(1e6 * (event.end - event.start))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e.get("name") == "thread_name"}
    assert all(named[bar["pid"], bar["tid"]] == bar["cat"] for bar in bars)

    ax = plot_timeline(events)
    rows = [label.get_text() for label in ax.get_yticklabels()]
    lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
    assert rows == [f"rank {rank}  {lane}" for rank in (0, 1) for lane in lanes]
    assert len(ax.collections) == len(events)


def test_a_predicted_timeline_is_drawn_alike():
    ax = plot_timeline([Event(0, "compute", "forward a", 1.0, 1.5), Event(0, "copy", "a", 1.25, 2.0)])
    (first, second) = (box.get_extents().bounds for collection in ax.collections for box in collection.get_paths())
    assert first[0] == 0 and first[2] == 500 and second[0] == 250 and second[2] == 750


@pytest.mark.parametrize("stage", range(4))
def test_the_grid_shows_what_the_stage_shards(stage):
    shown = []  # all that rank 1 of 4 showed
    run(4, step_by_step, stage, SMALL, 2, lambda rank, *now: shown.append(now) if rank == 1 else None)
    last = dict(shown)["optimizer step"]
    share = {"parameters": 1 if stage < 3 else 1 / 4, "gradients": 1 if stage < 2 else 1 / 4}
    for units in last.values():
        expected = share | {"optimizer": 1 if stage < 1 else 1 / 4}
        assert units == pytest.approx(expected, abs=0.01)
    assert all(unit["gradients"] == 0 for unit in dict(shown)["zero_grad"].values())
    whole = [sum(unit["parameters"] == 1 for unit in units.values()) for _, units in shown]
    if stage == 3:  # a block at a time, and the root
        assert max(whole) == 2 and min(whole) == 0
    else:
        assert min(whole) == 4


def test_the_grid_is_drawn(capsys):
    assert grid(["--delay", "0", "--steps", "1", "--layers", "2", "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "rank 1" in out and "nothing" in out and all(len(line) <= 80 for line in out.splitlines())
    assert grid(["--delay", "-1"]) == 2
    assert "--delay -1" in capsys.readouterr().err

    units = {"a": dict(zip(STATES, (1.0, 0.5, 0.0)))}
    cell = draw_text([("now", units)]).columns[1]._cells[0]
    assert cell.plain == "██ ▄▄ ·· "


@pytest.mark.slow
def test_the_grid_goes_on_by_hand(capsys, monkeypatch):
    """Each Enter is one event of rank 0; the first picture is whole; where nobody types it goes on by itself."""
    seen = []
    monkeypatch.setattr("builtins.input", lambda: seen.append(capsys.readouterr().out) or "")
    assert grid(["--by-hand", "--stage", "1", "--steps", "1", "--layers", "2", "--world-size", "2"]) == 0
    assert len(seen) >= 3 and all("rank 1" in out and "shard" in out for out in seen)
    assert "zero_grad" in seen[-1]

    monkeypatch.setattr("builtins.input", lambda: seen.append("") or "q")
    seen.clear()
    assert grid(["--by-hand", "--steps", "1", "--layers", "2", "--world-size", "2"]) == 0 and len(seen) == 1
