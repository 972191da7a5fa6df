"""What notebooks 02 to 02c measure with: batches, messages, listings; and pictures that only they need."""

import time

import torch

from minizero import World
from minizero.engines.ddp import CoreDDP
from minizero.engines.zero1 import CoreZero1
from minizero.engines.zero2 import CoreZero2
from minizero.engines.zero3 import CoreZero3
from notebooks.tools import zero, zero_pictures


def test_a_step_has_the_same_sequences_on_any_number_of_ranks():
    alone, shared = (
        [torch.cat(parts) for parts in zip(*World(n, "cpu").run(zero.batch, 3, sequences=4, tokens=8))] for n in (1, 2)
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, shared)) and alone[0].shape == (4, 8)
    assert torch.equal(alone[0][:, 1:], alone[1][:, :-1])
    assert not torch.equal(World(1, "cpu").run(zero.batch, 4, sequences=4, tokens=8)[0][0], alone[0])


def test_every_message_is_told_and_a_slow_link_takes_its_time():
    def send(comm):
        outgoing, incoming = comm.rank * zeros(), zeros()
        began = time.perf_counter()
        comm.send_recv(outgoing, 1 - comm.rank, incoming, 1 - comm.rank)
        return time.perf_counter() - began

    def zeros():
        return torch.zeros(1000)

    told = []
    with zero.each_message(lambda *message: told.append(message)):
        World(2, "cpu").run(send)
    assert sorted(told) == [(0, 1, 4000), (1, 0, 4000)]
    with zero.slow_link(4000 / 0.1):
        assert min(World(2, "cpu").run(send)) >= 0.1
    World(2, "cpu").run(send)
    assert len(told) == 2, "after the block nobody is told any more"


def test_changes_name_the_method_and_show_its_lines():
    text = zero.changes(CoreZero1, CoreZero2, "keep", "reduce")
    assert text.startswith("- CoreZero1\n+ CoreZero2\n\nreduce:\n")
    assert "\nreduce:" not in zero.changes(CoreDDP, CoreZero1, "before_forward")
    assert "+        unit.set_gradient(reduce_scatter(" in text and "#" not in text, "without comments"
    assert zero.code(CoreZero2, "reduce")[-1].strip().startswith("unit.set_gradient(reduce_scatter(")
    assert zero.code(CoreZero2, "gather") == [], "Zero2 has no such method of its own"
    stages = (CoreDDP, CoreZero1, CoreZero2, CoreZero3)
    names = [(stage, name) for stage in stages for name in vars(stage) if callable(vars(stage)[name])]
    assert not any("#" in line for stage, name in names for line in zero.code(stage, name))


def test_a_table_has_two_decimals_and_its_first_column_to_the_left():
    assert zero.table(["a", "b"], [["x", 1.0], ["y", 2]]).data == "| a | b |\n| --- | --: |\n| x | 1.00 |\n| y | 2 |"


def test_peaks_and_factors_are_drawn_with_their_units():
    (axes,) = zero_pictures.draw_peaks([8, 16], {"DDP": [2**20, 2**21], "Zero1": [2**20, 2**20]}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 2], [1, 1]] and "MiB" in axes.get_ylabel()
    left, right = zero_pictures.draw_factors((1, 2), [2**21, 2**20], [2**20, 2**22]).axes
    assert [bar.get_height() for bar in left.patches] == [2, 1] and [bar.get_height() for bar in right.patches] == [
        1,
        4,
    ]


def test_a_page_is_drawn_beside_one_and_five_layers():
    from minizero.memory import Ledger

    x = torch.ones(256, requires_grad=True)
    with Ledger() as ledger:
        (x * 2).sum().backward()
    (axes,) = zero_pictures.draw_page(ledger.curve, 8192, 4).axes
    assert [line.get_ydata()[0] for line in axes.lines[:2]] == [2, 10] and "KiB" in axes.get_ylabel()
    (area,) = axes.collections
    assert area.get_paths()[0].get_extents().y1 == max(sample["total"] for sample in ledger.curve) / 1024
    words = [text.get_text() for text in axes.texts]
    assert words == ["1 layer", "5 layers", "all 4 layers: 8 KiB ↑", "forward", "backward"]


def test_places_of_a_shard_and_of_a_replica():
    kept = (torch.zeros(8), torch.zeros(2))
    assert zero.places(kept, 3) == {"parameters w": range(8), "gradients g": range(6, 8)}
