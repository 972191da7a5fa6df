"""The ledger: what it counts, as what, when and for whom; and what it refuses."""

import contextlib
import copy
import gc
import io
import json
import threading
import weakref

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from minizero import GPT, GPTConfig
from minizero.memory import CATEGORIES, Ledger, tag
from minizero.memory.__main__ import main
from minizero.memory.tables import by_module, print_peak, print_ranks
from minizero.memory.tape import Record
from tests.support.helpers import STAGES, run

CONFIG = GPTConfig(vocabulary=64, sequence_length=8, width=64, layers=2, heads=2)
TOKENS = torch.zeros(2, 8, dtype=torch.long)


def test_a_plain_module_is_measured_like_an_engine():
    module = nn.Sequential(nn.Linear(100, 200, bias=False), nn.ReLU(), nn.Linear(200, 50, bias=False))
    optimizer = torch.optim.Adam(module.parameters())
    x = torch.randn(30, 100)
    with Ledger(module, optimizer) as ledger:
        for _ in range(2):
            ledger.reset()
            module(x).sum().backward()
            optimizer.step()
            current = ledger.current
            optimizer.zero_grad()
    weights = 4 * (100 * 200 + 200 * 50)
    assert current["parameters"] == current["gradients"] == weights
    assert current["optimizer"] == 2 * weights + 2 * 4  # two moments, and a step count for each weight
    # ReLU keeps its output, which the second layer keeps too. Then there are the sum, and its gradient, one.
    assert ledger.peak["activations"] == 4 * 30 * 200 + 4 + 4
    assert {sample.phase for sample in ledger.curve} == {"forward", "backward", "optimizer", "between"}
    assert ledger.peak["total"] == max(sum(sample[c] for c in CATEGORIES) for sample in ledger.curve)


def test_what_was_born_before_forward_is_no_activation():
    module = nn.Linear(10, 10)
    with Ledger(module) as ledger:
        x = torch.ones(1000, 10)
        module(x).sum().backward()
        assert ledger.current["temporary"] >= x.nbytes and ledger.peak["activations"] < x.nbytes + 100


def test_temporaries_inside_a_phase_reach_the_peak():
    module = nn.Linear(10, 10)
    with Ledger(module) as ledger:
        with torch.no_grad():
            (torch.ones(1000, 100) + 1).sum()
        held = ledger.current["temporary"]
    assert ledger.peak["temporary"] >= 2 * 400_000 and held < 100
    assert ledger.peak["activations"] == 0


def test_views_count_once_and_resized_storages_as_they_are():
    with Ledger() as ledger:
        a = torch.zeros(1000)
        view, other = a[10:], a.view(10, 100).t()
        assert ledger.current["total"] == 4000
        a.untyped_storage().resize_(0)
        assert ledger.current["total"] == 0
        a.untyped_storage().resize_(4000)
        b = torch.empty(0)
        b.resize_(500)
        assert ledger.current["total"] == 6000
        tag(b, "gradients")
        assert ledger.current["gradients"] == 2000
        del a, view, other, b
        assert ledger.current["total"] == 0
    assert [s["total"] for s in ledger.curve if s["total"]] == [4000, 4000, 4000, 6000, 2000]
    assert ledger.peak == dict.fromkeys(CATEGORIES, 0) | {"temporary": 4000, "gradients": 2000, "total": 6000}


def test_what_is_older_is_not_counted_when_it_is_written_to():
    older, out = torch.zeros(1000), torch.empty(0)
    norm = nn.BatchNorm1d(3)
    with Ledger() as ledger:
        older.add_(1)
        torch.ones(4, out=older[:4])
        assert ledger.current["total"] == 0
        torch.add(torch.ones(10), 1, out=out)
        assert ledger.current["total"] == 0
        kept = [norm(torch.ones(20, 3)), *torch._foreach_add([older, older], 1)]  # new tensors, in a list too
        assert ledger.current["total"] >= 4 * 60 + 8000
        del kept


def test_each_thread_has_its_own_ledger_and_only_one():
    sizes = {}

    def work(size):
        with Ledger() as ledger:
            keep = torch.zeros(size)
            sizes[size] = ledger.current["total"]
            del keep

    with Ledger() as outer:
        threads = [threading.Thread(target=work, args=(size,)) for size in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outer.current["total"] == 0
        with pytest.raises(RuntimeError, match="watches this thread already"), Ledger():
            pass
    assert sizes == {10: 40, 20: 80}
    with Ledger():  # and afterwards it is free again
        pass


def test_the_ledger_changes_no_number():
    def losses(watch):
        model = GPT(CONFIG)
        tokens = torch.arange(8)[None]
        if not watch:
            return model(tokens, tokens).item()
        with Ledger(model):
            return model(tokens, tokens).item()

    assert losses(True) == losses(False)


# When, and for whom.


def test_each_phase_has_its_own_peak():
    module = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    with Ledger(module, optimizer) as ledger:
        module(torch.ones(50, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    phases, weight = ledger.peak_by_phase, 40_000
    assert list(phases) == ["between", "forward", "backward", "optimizer"]
    assert phases["forward"]["gradients"] == phases["forward"]["optimizer"] == 0
    assert phases["backward"]["gradients"] == weight and phases["backward"]["optimizer"] == 0
    assert phases["optimizer"]["optimizer"] == 2 * weight + 4
    # The denominator of Adam's update, and its square root before the division.
    assert phases["optimizer"]["temporary"] == 2 * weight
    assert phases["optimizer"]["total"] == 6 * weight + 4 == ledger.peak["total"]
    assert phases["between"]["total"] == 3 * weight + 4
    for category in CATEGORIES:
        assert ledger.peak[category] == max(phase[category] for phase in phases.values())


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_an_optimizers_temporaries_are_temporary_and_inside_its_step(options):
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with Ledger(model, optimizer) as ledger:
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        step = [sample for sample in ledger.curve if sample.phase == "optimizer"]
    total = 4 * sum(p.numel() for p in model.parameters())
    assert step[-1]["optimizer"] == ledger.peak["optimizer"] == 2 * total + 4 * len(list(model.parameters()))
    largest = max(4 * p.numel() for p in model.parameters())
    temporary = max(sample["temporary"] for sample in step)
    # In the loop the denominator, its square root, and the last parameter's, which Python still holds.
    expected = {"foreach=False": 3 * largest, "foreach=True": total, "fused=True": 0}
    assert temporary == pytest.approx(expected["=".join(map(str, *options.items()))], rel=0.02, abs=200)


def test_every_byte_of_the_peak_has_a_holder():
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with Ledger(model, optimizer) as ledger:
        for _ in range(2):
            model(TOKENS, TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = ledger.holders
    assert sum(row["bytes"] for row in rows) == ledger.peak["total"]
    modules = by_module(rows)
    assert sum(held["total"] for held in modules.values()) == ledger.peak["total"]
    up = model.blocks[0].up.weight.nbytes
    assert modules["blocks.0.up"]["parameters"] == up and modules["blocks.0.up"]["optimizer"] == 2 * up + 4
    assert modules["embedding"]["parameters"] == model.embedding.weight.nbytes  # tied to the head: once
    names = {name for name, _ in model.named_modules()} | {"GPT"}
    assert {name for name in modules if not name.startswith("(")} <= names
    assert list(modules) == sorted(modules, key=lambda name: -modules[name]["total"])


def test_an_activation_belongs_to_the_module_and_the_operator_that_made_it():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(10, 20), nn.Sequential(nn.Linear(20, 30), nn.Tanh())

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    model = Outer()
    with Ledger(model) as ledger:
        out = model(torch.ones(100, 10))
        loss = out.exp().sum()
        loss.backward()
    made = {
        (row["module"], row["operator"]): row["bytes"]
        for row in ledger.holders
        if row["category"] == "activations" and row["bytes"] > 100
    }
    # At the peak exp's output, which its backward needs, is in nobody's forward; Linear's is not kept by Tanh.
    assert made == {
        ("Outer", "aten.relu.default"): 8000,
        ("second.1", "aten.tanh.default"): 12_000,
        ("", "aten.exp.default"): 12_000,
    }


def test_recompute_and_failures_leave_no_module_behind():
    """Recompute stops a forward from inside, by an exception, once it has what it needs."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Tanh(), nn.Linear(10, 10), nn.Dropout(0.5)), nn.ReLU())
    with Ledger(model) as ledger:
        x = torch.ones(5, 10, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        position = ledger.recorder.position
        assert position.running == [""] and position.phase == "backward"
        torch.ones(1)
        assert position.phase == "between"
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(5, 11))
        assert position.running == [""]
        model(x)
    assert any("addmm" in sample.operator for sample in ledger.curve if sample.phase == "backward")
    phases = [entry for entry in ledger.tape if isinstance(entry, str)]
    assert phases == ["between", "forward", "backward", "between", "forward", "forward"]


def test_a_gradient_inside_forward_does_not_end_it():
    class Penalty(nn.Linear):
        def forward(self, x):
            (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return (slope * 2).square().sum()

    model = Penalty(10, 10)
    with Ledger(model) as ledger:
        loss = model(torch.ones(1000, 10, requires_grad=True))
        assert ledger.recorder.position.phase == "forward"
        loss.backward()
    assert ledger.peak["activations"] >= 40_000  # slope · 2, which square's backward needs


def test_ranks_side_by_side():
    def work(comm, stage):
        model = stage(GPT(CONFIG), comm)
        with Ledger(model) as ledger:
            model(TOKENS, TOKENS).backward()
        return ledger.peak, by_module(ledger.holders)

    for stage in STAGES:
        results = run(2, work, stage)
        names = set().union(*(modules for _, modules in results))
        # A flat buffer belongs to a whole block, and the root unit's to several modules.
        assert {"blocks.0", "blocks.1"} <= names and not any("module" in name for name in names)
        assert "root" in names or "(several)" in names
        console = Console(file=io.StringIO(), width=100)
        print_ranks([peak for peak, _ in results], console)
        lines = [line.split() for line in console.file.getvalue().splitlines()]
        for rank, (peak, _) in enumerate(results):
            row = next(line for line in lines if line and line[0] == str(rank))
            assert row[-1] == f"{peak['total'] / 2**20:.2f}" and row[1] == f"{peak['parameters'] / 2**20:.2f}"


# What there is to count.


def test_tensors_made_from_python_numbers_count():
    with Ledger() as ledger:
        keep = torch.tensor([1.0, 2.0])
        assert ledger.current["total"] == keep.nbytes
        again = torch.as_tensor(keep)
        assert ledger.current["total"] == keep.nbytes and again is keep


def test_copies_of_tensors_count():
    old = torch.ones(100)
    with Ledger() as ledger:
        kept = [copy.deepcopy(old)]
        assert ledger.current["total"] == 400
        torch.save(kept, file := io.BytesIO())
        file.seek(0)
        kept += torch.load(file)
        assert ledger.current["total"] == 800


def test_inference_mode_hides_no_copy():
    """There `to`, `reshape` and `contiguous` come whole, and say that they give a view."""
    old = torch.ones(10, 10)
    with Ledger() as ledger, torch.inference_mode():
        kept = [old.to(torch.float64), old.t().contiguous(), old.t().reshape(100)]
        assert ledger.current["total"] == sum(tensor.nbytes for tensor in kept) == 1600
        kept += [old.to(torch.float32), old.contiguous(), old.reshape(100), kept[0].view(100)]  # these are views
        assert ledger.current["total"] == 1600


def test_what_an_operator_is_given_to_write_to_may_grow():
    with Ledger() as ledger:
        kept = torch.empty(0)
        assert ledger.current["total"] == 0
        torch.add(torch.ones(100), 1, out=kept)
        assert ledger.current["total"] == kept.nbytes == 400


def test_what_has_no_bytes_holds_none():
    with Ledger() as ledger:
        kept = [torch.empty(0), torch.ones(10)]
        assert len(kept) == 2 and [row["operator"] for row in ledger.holders] == ["aten.ones.default"]


def test_a_storage_at_the_address_of_one_that_is_gone_is_another():
    with Ledger() as ledger:
        address = (tensor := torch.empty(10)).untyped_storage()._cdata
        del tensor
        storages = [torch.UntypedStorage(40) for _ in range(1000)]
        storage = next(storage for storage in storages if storage._cdata == address)
        tag(torch.empty(0).set_(storage), "communication")
        assert ledger.current["communication"] == 40


def test_a_gradient_from_before_is_a_gradient():
    module = nn.Linear(10, 10, bias=False)
    module.weight.grad = torch.ones(10, 10)
    with Ledger(module) as ledger:
        assert ledger.current["gradients"] == 400


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_compressed_sparse_tensors_count():
    with Ledger() as ledger:
        kept = [torch.eye(10).to_sparse_csr()]
        before = ledger.current["total"]
        assert before >= 11 * 8 + 10 * 8 + 10 * 4
        kept.append(kept[0].clone())
        assert ledger.current["total"] - before >= 11 * 8 + 10 * 8 + 10 * 4
        kept.clear()
        assert ledger.current["total"] == 0


def test_states_in_lists_are_the_optimizers():
    module = nn.Linear(40, 40)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=5)

    def loss():
        optimizer.zero_grad()
        loss = module(torch.ones(4, 40)).square().sum()
        loss.backward()
        return loss

    with Ledger(module, optimizer) as ledger:
        for _ in range(2):
            optimizer.step(loss)
    (state,) = optimizer.state.values()
    assert {row["phase"] for row in ledger.holders if row["category"] == "optimizer"} == {"optimizer"}
    assert state["old_dirs"] and ledger.current["optimizer"] >= len(state["old_dirs"]) * 40 * 41 * 4
    assert ledger.current["temporary"] == 0


@pytest.mark.parametrize("how", ["the ledger inside", "the ledger outside", "meta"])
def test_a_step_that_only_pretends_counts_like_a_real_one(how):
    """Every figure to the byte: a model that does not fit is measured so. On a CPU meta takes the GPU's ways."""

    nothing = contextlib.nullcontext()

    def peak(mode, device="cpu", outside=nothing):
        with mode:
            module = nn.Sequential(nn.Linear(100, 200), nn.GELU(), nn.Dropout(), nn.Linear(200, 50))
            if device == "meta":
                module.to(device)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
            x = torch.randn(30, 100, device=device)
        with Ledger(module, optimizer) as ledger, outside:
            for _ in range(2):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return ledger.peak

    real = peak(nothing)
    if how == "meta":
        pretended = peak(nothing, "meta")
    else:
        mode = FakeTensorMode()
        pretended = peak(mode, outside=mode if how == "the ledger outside" else nothing)
    assert real["activations"] > 48_000 and real["parameters"] == real["optimizer"] == 121_000
    assert {key: pretended[key] for key in CATEGORIES if key != "temporary"} == {
        key: real[key] for key in CATEGORIES if key != "temporary"
    }
    assert pretended["total"] == pytest.approx(real["total"], rel=0.01)


def test_a_tensor_made_of_tensors_counts_as_those():
    """As DTensor is, of which PyTorch's own sharding is made: the outside has no bytes."""
    inside = torch.ones(100), torch.ones(100)
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(*inside))
    with Ledger(module) as ledger:
        assert ledger.current["parameters"] == 800
        twice = module.weight * 2
        assert ledger.current["total"] == 1600 and twice.a.sum() == 200


def test_a_sparse_gradient_counts_by_its_values_and_indices():
    table = nn.Embedding(1000, 10, sparse=True)
    with Ledger(table) as ledger:
        table(torch.tensor([1, 2])).sum().backward()
        gradient = table.weight.grad
        assert gradient.is_sparse and ledger.current["gradients"] == 2 * 10 * 4 + 2 * 8
        before = ledger.current["temporary"]
        kept = gradient.clone()
        assert ledger.current["temporary"] == before + 2 * 10 * 4 + 2 * 8 and kept.is_sparse


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
        b.untyped_storage().resize_(0)
        del b
        assert [sample["total"] for sample in ledger.curve] == [80, 0, 0]


# As data, table and picture.


def test_a_summary_is_plain_data_and_the_tables_say_the_same():
    model = GPT(CONFIG)
    with Ledger(model) as ledger:
        model(TOKENS, TOKENS).backward()
    summary = ledger.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["peak"] == ledger.peak and summary["holders"] == ledger.holders
    curve = summary["curve"]
    assert curve["total"] == [sample["total"] for sample in ledger.curve]
    assert len(set(map(len, curve.values()))) == 1 and curve["number"] == sorted(curve["number"])
    moment = curve["total"].index(ledger.peak["total"])
    assert curve["phase"][moment] == "backward" and curve["operator"][moment].startswith("aten.")

    console = Console(file=io.StringIO(), width=80)
    print_peak(summary, console, rows=5)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert f"in backward, after {curve['operator'][moment].removesuffix('.default')}" in text.replace("\n", " ")
    rows = [line.split() for line in text.splitlines()]
    whole = f"{ledger.peak['total'] / 2**20:.2f}"
    assert next(row for row in rows if row[:2] == ["joint", "total"])[-1] == whole
    assert "(backward)" in by_module(summary["holders"])  # what is in no module's forward
    # Layers are added up where there are too many rows, and what is small comes last, together.
    five = by_module(summary["holders"], 5)
    assert len(five) == 5 and list(five)[-1].endswith("others") and any(".*" in name for name in five)
    assert sum(held["total"] for held in five.values()) == ledger.peak["total"]


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


def test_the_command_prints_the_demo_models_table_and_writes_files(tmp_path, capfd):
    small = ["--width", "32", "--layers", "2", "--heads", "2", "--sequence-length", "16"]
    assert main([*small, "--output", str(tmp_path / "new")]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    for words in ("joint total", "blocks.*.up", "the ledger: tensors", "PyTorch's profiler", "optimizer"):
        assert words in out
    numbers = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert numbers["config"]["width"] == 32
    assert numbers["compared"]["profiler"] == pytest.approx(numbers["compared"]["ledger"], rel=1e-3)
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--width", "30", "--heads", "4"], "--width 30 must be divisible by --heads 4"),
        (["--layers", "0"], "--layers: must be a whole number"),
        (["--what"], "--what"),
        (["--layers", "99999999"], "this machine has"),
        (["--output", "/proc/no"], "--output: cannot write"),
    ],
)
def test_the_command_refuses_in_one_line(wrong, words, capfd):
    assert main(wrong) == 2
    out, error = capfd.readouterr()
    assert out == "" and words in error and len(error.splitlines()) == 1


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


@pytest.mark.filterwarnings("error")  # PyTorch makes one of a hook that fails after a failure
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.to("meta"), "torch.float32 on cpu to torch.float32 on meta"),
        (lambda model: model.half(), "torch.float32 on cpu to torch.float16 on cpu"),
    ],
)
def test_a_model_that_moves_is_refused_at_its_next_forward_or_at_the_end(change, words):
    model = GPT(CONFIG)
    with pytest.raises(RuntimeError, match="move or cast the model first") as caught, Ledger(model):
        change(model)
    assert "GPT" not in str(caught.value).split()[1] and words in str(caught.value)

    model = GPT(CONFIG)
    with Ledger(model) as ledger:
        change(model)
        with pytest.raises(RuntimeError, match="embedding.weight went from"):
            model(TOKENS, TOKENS)
        ledger.hooks.places.clear()
    with pytest.raises(ZeroDivisionError), Ledger(model := GPT(CONFIG)):  # what failed first is what is told
        change(model)
        raise ZeroDivisionError


def test_what_is_tagged_stays_what_it_is():
    """As the FP32 master weights of an engine, which are parameters to the optimizer and states to the formula."""
    module = nn.Linear(10, 10, bias=False)
    tag(module.weight, "optimizer")
    with Ledger(module) as ledger:
        assert ledger.current["optimizer"] == 400 and ledger.current["parameters"] == 0


def test_what_is_no_module_and_no_optimizer_is_refused():
    for wrong, words in (
        ({"model": "gpt"}, "model must be a Module"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer must be a"),
    ):
        with pytest.raises(TypeError, match=words):
            Ledger(**wrong)


def test_an_unknown_category_is_refused():
    with pytest.raises(ValueError, match="unknown category 'weights': use one of parameters, gradients"):
        tag(torch.ones(1), "weights")
