"""The ledger: it measures a plain module as an engine, changes no number, and refuses what it cannot measure."""

import collections
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from minizero import GPT
from minizero.memory import Ledger, tag
from minizero.memory.tape import Record
from tests.support.by_module import by_module
from tests.support.helpers import STAGES, run
from tests.support.ledger_gpt import CONFIG, TOKENS


def test_each_thread_has_its_own_ledger():
    sizes = {}

    def work(size):
        with Ledger() as ledger:
            keep = torch.zeros(size)
            sizes[size] = ledger.current["total"]
            del keep

    with Ledger() as outer:
        threads = [threading.Thread(target=work, args=(size,)) for size in (10, 20)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert outer.current["total"] == 0
    assert sizes == {10: 40, 20: 80}


def test_the_modules_of_an_engine_have_their_names():
    def work(comm, stage):
        model = stage(GPT(CONFIG), comm)
        with Ledger(model) as ledger:
            model(TOKENS, TOKENS).backward()
        return by_module(ledger.holders)

    for stage in STAGES:
        names = set().union(*run(2, work, stage))
        # A flat buffer belongs to a whole block, and the root unit's to several modules.
        assert {"blocks.0", "blocks.1"} <= names and not any("module" in name for name in names)
        assert "root" in names or "(several)" in names


def test_it_remembers_what_was_and_holds_nothing():
    gc.collect()
    gc.disable()
    try:
        records = sum(type(thing) is Record for thing in gc.get_objects())
        model = GPT(CONFIG)
        gone = weakref.ref(model)
        with Ledger(model) as ledger:
            kept = torch.ones(10)
            model(TOKENS, TOKENS).backward()
        before, curve = ledger.current, ledger.curve
        assert before["parameters"] == before["gradients"] > 0
        ledger.model = None  # its own reference
        del model
        assert gone() is None
        assert ledger.current == before and ledger.curve == curve  # as it was at the end of the block
        watcher = weakref.ref(ledger)
        del ledger
        assert watcher() is None and kept.sum() == 10
        assert sum(type(thing) is Record for thing in gc.get_objects()) == records
    finally:
        gc.enable()


def test_reset_forgets_what_is_gone_and_keeps_what_is_alive():
    with Ledger() as ledger:
        a = torch.ones(100)
        del a
        b = torch.ones(10)
        b.untyped_storage().resize_(80)
        ledger.reset()
        assert ledger.current["total"] == ledger.peak["total"] == 80 and len(ledger.curve) == 1
        assert len(ledger.tape) == 2  # the phase, and b
        b.untyped_storage().resize_(0)
        del b
        assert [sample["total"] for sample in ledger.curve] == [80, 0, 0]


@pytest.mark.parametrize("change", [nn.Module.half, lambda model: model.to("meta")])
def test_a_model_that_moves_inside_is_counted_where_it_is(change):
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    with Ledger(model) as ledger:
        change(model)
        model(torch.ones(5, 10).to(model[0].weight)).sum().backward()
        held = sum(parameter.nbytes for parameter in model.parameters())
        assert ledger.current["parameters"] == ledger.current["gradients"] == held
        change(model.double())
    assert ledger.current["parameters"] == sum(parameter.nbytes for parameter in model.parameters())


def test_a_picture_says_what_it_cannot_see():
    with Ledger() as ledger:
        for _ in range(3):
            torch.ones(1000) + 1
    axes = ledger.plot()
    assert "operators" in axes.get_xlabel() and "not seen" in axes.get_xlabel()
    assert "12 bytes" in ledger.plot(axes, "12 bytes").get_xlabel()
    peak = next(line for line in axes.lines if line.get_marker() == "o")
    assert peak.get_ydata()[0] * 2**20 == pytest.approx(ledger.peak["total"])
    assert ledger.curve[-1].number == 6  # operators
    assert 1 <= peak.get_xdata()[0] <= axes.get_xlim()[1] == 7


def test_a_snapshot_is_the_curve_and_pytorchs_own_tools_read_it(tmp_path):
    model = GPT(CONFIG)
    with Ledger(model) as ledger:
        for _ in range(2):
            model(TOKENS, TOKENS).backward()
        kept = torch.ones(10)
        [kept.untyped_storage().resize_(size) for size in (0, 80)]
    ledger.save_snapshot(tmp_path / "step.pickle")
    whole = pickle.loads(content := (tmp_path / "step.pickle").read_bytes())
    held, moments = collections.Counter(), []
    for event in whole["device_traces"][0]:
        held[event["category"]] += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        moments.append({**held, "total": held.total()})

    def points(moments):
        nonzero = ({name: size for name, size in moment.items() if size} for moment in moments)
        return [point for point, _ in itertools.groupby(nonzero)]

    theirs = points(ledger.curve)
    assert points(moments)[-len(theirs) :] == theirs and len(theirs) > 100
    (segment,) = whole["segments"]
    active = (block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    assert sum(active) == segment["allocated_size"] == ledger.current["total"]
    assert content[1] == 4 and event["category"] == "unknown"  # without these two the viewer fails
    assert " entries" in _memory_viz.trace(whole) and "segments: 1" in _memory_viz.segsum(whole)
    assert "blocks.0.up" in _memory_viz.memory(whole, format_flamegraph=str) and _memory_viz.trace_plot(whole)


# What is refused.


def test_a_ledger_is_opened_once():
    ledger = Ledger()
    with ledger:
        with pytest.raises(RuntimeError, match="watches this thread already"), ledger:
            pass
        assert ledger.current["total"] == 0
    with pytest.raises(RuntimeError, match="make a new Ledger"), ledger:
        pass
    with Ledger():  # and nothing is left behind
        pass


def test_what_is_no_module_no_optimizer_and_no_category_is_refused():
    with pytest.raises(TypeError, match="model must be a Module"):
        Ledger("gpt")
    with pytest.raises(TypeError, match="optimizer must be a"):
        Ledger(optimizer=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="unknown category 'weights': use one of parameters, gradients"):
        tag(torch.ones(1), "weights")
