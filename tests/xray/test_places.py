"""Host and card, scripts as they are, and steps in time. Loops that say "cuda" are held against another device."""

import contextlib
import functools
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from minizero.xray import Plan, answers, card
from minizero.xray.__main__ import maker, parse
from minizero.xray.case import NotPossible, case_of
from minizero.xray.fake import pretend
from minizero.xray.places import CARD, HOST, having, place_of
from minizero.xray.report import Report
from tests.support.other_device import POSSIBLE
from tests.support.processes import printed_by
from tests.support.xray_cases import Does, attention
from tests.xray.scripts.places import net, training

SCRIPTS = Path(__file__).parent / "scripts"
PLACES = ["data_set", "average", "masters", "kept", "saved", "every_third"]
MAKES = [f"{file.name}:make" for file in sorted(SCRIPTS.glob("*.py")) if "def make" in file.read_text()]
MAKES += ["muon.py:muon", "muon.py:in_backward", *(f"places.py:{name}" for name in PLACES)]


@pytest.fixture(scope="module")
def on_another_device():
    if not POSSIBLE:
        pytest.skip(f"PyTorch {torch.__version__} has no backend in Python for another device")
    said = printed_by("tests.support.other_device", *(f"{SCRIPTS}/{make}" for make in MAKES))
    return {Path(make).name: found for make, found in json.loads(said.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_a_script_as_it_is_holds_what_it_holds_on_another_device(make, on_another_device, monkeypatch):
    """But for what a card alone has: cuBLAS's workspace, and scratch inside of operators."""
    monkeypatch.setattr(card, "SCRATCH", {})
    monkeypatch.setattr(card, "workspace", lambda card: torch.empty(0))
    monkeypatch.setattr(sys, "path", sys.path[:])
    case = case_of(maker(parse([f"{SCRIPTS}/{make}"])), card="h100")
    assert case.run(Plan()).peak["total"] == on_another_device[make]


def peak_of(make):
    return case_of(make, card="h100").run(Plan()).peak["total"]


def test_what_lies_on_the_host_is_no_part_of_the_peak_and_is_said(capfd):
    data = torch.zeros(1024, 512)
    report = Report(case_of(lambda: training(batch=lambda: data[:256]), card="h100"))
    assert report.peak["total"] == peak_of(training) and report.peak["host"] > data.nbytes
    report.show()
    assert "On the host, and not in the peak: up to 2.00 MiB." in capfd.readouterr().out
    assert all(row.category != "host" for row in report.holders)
    assert case_of(training).run(Plan()).peak["host"] == 0  # as on a CPU all is in one place


def test_a_tensor_says_where_it_lies_and_its_gradient_goes_back():
    with pretend(), having(marks=True):
        host = torch.ones(8, 8, requires_grad=True)
        there = host.to("cuda", torch.float16)
        assert (place_of(host), there.device, there.is_cuda, there.get_device()) == (HOST, CARD, True, 0)
        made = there + 1, there[0], there.cpu(), torch.zeros_like(there), torch.vander(there[0])
        assert [*map(place_of, made)] == [CARD, CARD, HOST, CARD, CARD]
        assert place_of(torch.zeros(3, device=there.device)) == CARD != place_of(torch.zeros(3))
        assert place_of(there * torch.tensor(2.0)) == CARD and place_of(there[torch.tensor([0])]) == CARD
        (there.cpu().sum() + there.unbind()[0].sum().cpu()).backward()  # whose backward makes zeros of nothing
        (alone := torch.ones(8, 8, requires_grad=True)).unbind()[0].sum().backward()
        assert (host.grad.device, alone.grad.device, host.grad.dtype) == (HOST, HOST, torch.float32)
    moved = []
    with pretend(), having(marks=True):
        thread = threading.Thread(target=lambda: moved.append(torch.ones(1).to("cpu", torch.float64).device))
        thread.start()
        thread.join()
    assert moved == [HOST] and nn.Linear(8, 8).to("cpu").weight.device == HOST


def with_loss(batch, before=contextlib.nullcontext):
    """A make() of a net that returns its loss, and a batch of so many rows."""

    def loss(self, x):
        with before():
            return (self.net(x) - x).square().mean()

    return lambda: (Does(loss, net=net()), torch.ones(batch, 512, device="cuda"))


def test_rows_with_an_engine_agree_with_the_plain_row_or_are_refused():
    case = case_of(with_loss(256), card="h100")
    plain, engine, small = (case.run(plan).peak for plan in (Plan(), Plan(stage=3, ranks=1), Plan(eight_bit=True)))
    assert 0 < plain["host"] < 64  # an optimizer's counters of steps
    assert 0 <= engine["optimizer"] - plain["optimizer"] < 64 and plain["parameters"] <= engine["parameters"]
    assert abs(peak_of(training) - plain["total"]) < 64  # holds the batch, of which there is no copy
    assert 0 == small["host"] < small["optimizer"]
    case = case_of(with_loss(512, torch.autograd.graph.save_on_cpu), card="h100")
    assert case.run(Plan()).peak["host"] > 2**20 and case.run(Plan(micro_batches=2)).peak["host"] > 2**20
    with pytest.raises(NotPossible, match="it has tensors on the host"):
        case.run(Plan(stage=3, ranks=1))


def test_a_loss_in_chunks_goes_on_if_the_logits_are_asked_where_they_lie():
    def loss(self, x):
        logits = self.head(self.embedding(x))
        return nn.functional.cross_entropy(logits, torch.zeros(999).long().to(logits.device))

    layers = {"embedding": nn.Embedding(5000, 8), "head": nn.Linear(8, 5000)}
    case = case_of(lambda: (Does(loss, **layers), torch.zeros(999, device="cuda").long()), card="h100")
    assert case.run(Plan(chunked_loss=True)).peak["total"] < case.run(Plan()).peak["total"]


def lines_for_a_gpu(loss):
    """What scripts ask of a GPU. None of it holds memory."""
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.accelerator.is_available()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for call in (start.record, end.record, torch.cuda.synchronize, torch.cuda.reset_peak_memory_stats):
        call()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        name = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f} GiB"
    assert name == "NVIDIA H100 SXM, 79.18 GiB" and torch.cuda.get_device_capability() == (9, 0)
    assert isinstance(torch.Generator("cuda").manual_seed(0), torch.Generator)
    words = f"{loss.item():.3f} {loss.detach().cpu().numpy()} {start.elapsed_time(end)} {torch.cuda.memory_summary()}"
    assert words == "0.000 0.0 1.0 " and loss.tolist() == 0.0 and torch.cuda.FloatTensor(2, 3).is_cuda
    torch.distributed.barrier()


LINES = [
    (lambda: training(batch=lambda: next(iter(DataLoader(torch.zeros(512, 512), 256, num_workers=2)))), 0),
    (lambda: training(after=lines_for_a_gpu), 0),
    (lambda: training(nn.parallel.DistributedDataParallel(net(), gradient_as_bucket_view=True)), 0),
    (lambda: training(nn.parallel.DistributedDataParallel(net(), device_ids=[0])), 4 * (2 * 512 * 2048 + 2048 + 512)),
]


@pytest.mark.parametrize("make, more", LINES)
def test_a_loop_with_lines_for_a_gpu_holds_so_many_bytes_more(make, more):
    (case := case_of(make, card="h100")).run_all([Plan(), Plan(recompute=True)])  # in workers, as rows of the table
    assert case.run(Plan()).peak["total"] - peak_of(training) == more


def test_what_a_script_asks_of_a_gpu_is_answered_and_pytorch_is_not():
    with answers.answers("T4"):
        assert torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
        with pytest.warns(UserWarning, match="CUDA is not available"):  # PyTorch asks
            assert not torch.amp.GradScaler("cuda").is_enabled()
    assert nn.parallel.DistributedDataParallel is nn.parallel.distributed.DistributedDataParallel


MODEL = nn.Linear(512, 512).eval()
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


def of_globals():
    assert not MODEL.training  # a loop keeps its mode
    MODEL(torch.ones(64, 512)).mean().backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


def test_a_model_and_an_optimizer_may_be_globals_and_are_not_trained():
    before = MODEL.weight.clone()
    peak = case_of(lambda: (MODEL, of_globals)).run(Plan()).peak
    assert peak["optimizer"] == 2 * peak["parameters"] + 2 * 4 and not OPTIMIZER.state
    assert torch.equal(MODEL.weight, before) and MODEL.weight.grad is None


def blocks(run):
    """A model of three blocks, which `run` may run in one checkpoint, and a head."""
    layers = {"blocks": nn.Sequential(*(net(512) for _ in range(3))), "head": nn.Linear(512, 512)}
    return Does(lambda self, x: self.head(run(self.blocks, x)).mean(), **layers), torch.ones(4096, 512)


def image(made, every=1, kind=torch.optim.Adam):
    """A loop that trains an image, and no weight. Two functions count in one variable."""
    frozen, x, count = nn.Linear(64, 64).requires_grad_(False).to("cuda"), made(torch.zeros(256, 64, device="cuda")), 0
    optimizer = kind([x])

    def one():
        nonlocal count
        frozen(x).square().mean().backward()
        count += 1

    def step():
        one()
        if count % every == 0:
            optimizer.step()
            optimizer.zero_grad()

    return frozen, step


def test_what_is_trained_need_be_no_parameter_and_functions_share_a_count():
    assert peak_of(lambda: image(torch.Tensor.requires_grad_)) == peak_of(lambda: image(nn.Parameter)) > 2**18
    assert Report(case_of(lambda: image(nn.Parameter, every=3), card="h100")).case.notes == {SO_MANY}
    assert case_of(lambda: image(nn.Parameter, kind=torch.optim.Adagrad)).run(Plan()).peak["optimizer"] >= 2**16


SO_MANY = "Its optimizers step once in 3 calls of step(), so the step shown is 3 calls."
GROWS = "It grows: 0.20 MiB more are held after each step, most of it from test_places.py:"
RECOMPUTED = "In backward 56.00 MiB of the peak are recomputed, of 5 modules at once: a checkpoint around each block"
IDLE = "No gradient comes to 12 of 14 trained tensors, such as blocks.0.0.weight: they are not used, or a checkpoint"
KEPT = []
NOTES = [
    (lambda: training(every=3), SO_MANY),
    (lambda: training(every=100), "One of its optimizers does not step in 32 calls of step(), and has no states here."),
    (lambda: training(after=lambda loss: KEPT.append(torch.ones(100, 512, device="cuda"))), GROWS),
    (lambda: training(after=KEPT.append), "It grows: 4 bytes more are held after each step"),
    (lambda: blocks(lambda three, x: three(x)), None),
    (lambda: blocks(functools.partial(checkpoint, use_reentrant=False)), RECOMPUTED),
    (lambda: blocks(functools.partial(checkpoint, use_reentrant=True)), IDLE),
    (lambda: (attention(63), torch.ones(4, 8, 128, 63)), "Attention: FP32 with 63 numbers a head has no fused kernel"),
]


@pytest.mark.parametrize("make, words", NOTES)
def test_what_is_odd_in_a_step_is_told(make, words):
    report = Report(case_of(make, card="h100"))
    notes = report.case.notes
    assert len(notes) == bool(words) and all(note.startswith(words) for note in notes) and not KEPT
    if words == SO_MANY:
        assert report.peak["total"] >= peak_of(training)
    if words == GROWS:
        assert all(row.what[:4] != "None" for row in report.holders)
        assert any(row.what == "ones: 100 × 512" and row.tensors > 1 for row in report.holders)
