"""Host and card, scripts as they are, and steps in time. Loops that say "cuda" are held against another device."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minizero.xray import Plan, answers, card
from minizero.xray.__main__ import main, maker, parse
from minizero.xray.case import NotPossible, case_of
from minizero.xray.fake import pretend
from minizero.xray.places import CARD, HOST, having, place_of
from minizero.xray.report import Report
from tests.support.other_device import POSSIBLE
from tests.test_house import ROOT

SCRIPTS = Path(__file__).parent / "scripts"
PLACES = ["data_set", "average", "masters", "kept", "saved", "every_third"]
MAKES = [f"{file.name}:make" for file in sorted(SCRIPTS.glob("*.py")) if "def make" in file.read_text()]
MAKES += ["muon.py:muon", "muon.py:in_backward", *(f"places.py:{name}" for name in PLACES)]


@pytest.fixture(scope="module")
def on_another_device():
    if not POSSIBLE:
        pytest.skip(f"PyTorch {torch.__version__} has no backend in Python for another device")
    command = [sys.executable, "-m", "tests.support.other_device", *(f"{SCRIPTS}/{make}" for make in MAKES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {Path(make).name: found for make, found in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_a_script_as_it_is_holds_what_it_holds_on_another_device(make, on_another_device, monkeypatch):
    """But for what a card alone has: cuBLAS's workspace, and scratch inside of operators."""
    monkeypatch.setattr(card, "SCRATCH", {})
    monkeypatch.setattr(card, "workspace", lambda card: torch.empty(0))
    monkeypatch.setattr(sys, "path", sys.path[:])
    case = case_of(maker(parse([f"{SCRIPTS}/{make}"])), card="h100")
    assert case.run(Plan()).peak["total"] == on_another_device[make]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()


def loop(before=lambda x: x, after=lambda loss: None, every=1, wrap=lambda model: model):
    """What make() returns: a net on the card, and a step with lines of a script's before and after it."""
    model, x, calls = wrap(Net().to("cuda")), torch.ones(64, 512).cuda(), [0]
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        calls[0] += 1
        loss = model(before(x))
        loss.backward()
        if calls[0] % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        after(loss)

    return model, step


def peak_of(make, category="total", name="h100"):
    return case_of(make, card=name).run(Plan()).peak[category]


def test_what_lies_on_the_host_is_no_part_of_the_peak_and_is_said(capfd):
    data = torch.zeros(1024, 512)
    plain = peak_of(loop)
    report = Report(case_of(lambda: loop(before=lambda x: data[:64].to(x.device)), card="h100"))
    assert report.peak["total"] == plain and report.peak["host"] > 1024 * 512 * 4
    report.show()
    assert "On the host, and not in the peak: up to 2.00 MiB." in capfd.readouterr().out
    assert all(row.category != "host" for row in report.holders)
    assert case_of(loop).run(Plan()).peak["host"] == 0  # as on a CPU all is in one place


def test_a_tensor_says_where_it_lies_and_its_gradient_goes_back():
    with pretend(), having(marks=True):
        host = torch.ones(8, 8, requires_grad=True)
        there = host.to("cuda", torch.float16)
        assert (place_of(host), there.device, there.is_cuda, there.get_device()) == (HOST, CARD, True, 0)
        made = there + 1, there[0], there.cpu(), torch.zeros_like(there)
        assert [*map(place_of, made)] == [CARD, CARD, HOST, CARD]
        assert place_of(torch.zeros(3, device=there.device)) == CARD != place_of(torch.zeros(3))
        assert place_of(there * torch.tensor(2.0)) == CARD and place_of(there[torch.tensor([0])]) == CARD
        (there.cpu().sum() + there.sum().cpu()).backward()
        assert host.grad.device == HOST and host.grad.dtype == torch.float32
    moved = []
    with pretend(), having(marks=True):
        thread = threading.Thread(target=lambda: moved.append(torch.ones(1).to("cpu", torch.float64).device))
        thread.start()
        thread.join()
    assert moved == [HOST] and Net().to("cpu").layers[0].weight.device == HOST


@pytest.mark.parametrize(
    "words, before",
    [
        ("it uses a second card", lambda x: x.to("cuda:1")),
        ("one tensor lies on the host", lambda x: x + torch.ones(512)),
        ("one tensor lies on the host", lambda x: torch.ones(64, 512)[torch.arange(64, device="cuda")]),
    ],
)
def test_what_a_gpu_would_refuse_and_a_second_card_are_refused_with_the_line(words, before):
    with pytest.raises(NotPossible, match=rf"{words}.*test_places\.py:\d+"):
        peak_of(lambda: loop(before=before))


def test_rows_with_an_engine_agree_with_the_plain_row_or_are_refused():
    case = case_of(lambda: (Net().to("cuda"), torch.ones(64, 512, device="cuda")), card="h100")
    plain, engine = (case.run(plan).peak for plan in (Plan(), Plan(stage=3, ranks=1)))
    assert 0 < plain["host"] < 64  # an optimizer's counters of steps
    assert 0 <= engine["optimizer"] - plain["optimizer"] < 64 and plain["parameters"] <= engine["parameters"]
    own = peak_of(loop)  # holds the batch, of which there is no copy
    assert abs(own - plain["total"]) < 64
    assert 0 == case.run(Plan(eight_bit=True)).peak["host"] < case.run(Plan(eight_bit=True)).peak["optimizer"]

    class Away(Net):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    case = case_of(lambda: (Away().to("cuda"), torch.ones(512, 512, device="cuda")), card="h100")
    assert case.run(Plan()).peak["host"] > 2**20 and case.run(Plan(micro_batches=2)).peak["host"] > 2**20
    with pytest.raises(NotPossible, match="it has tensors on the host"):
        case.run(Plan(stage=3, ranks=1))


def test_a_loss_in_chunks_goes_on_if_the_logits_are_asked_where_they_lie():
    def make():
        model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 5000)).to("cuda")

        def step():
            logits = model(torch.zeros(999, device="cuda").long())
            nn.functional.cross_entropy(logits, torch.zeros(999).long().to(logits.device)).backward()

        return model, step

    case = case_of(make, card="h100")
    assert case.run(Plan(chunked_loss=True)).peak["total"] < case.run(Plan()).peak["total"]


def lines_for_a_gpu(loss):
    """What scripts ask of a GPU. None of it holds memory."""
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.accelerator.is_available()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        name = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f} GiB"
    assert name == "NVIDIA H100 SXM, 79.18 GiB" and torch.cuda.get_device_capability() == (9, 0)
    assert isinstance(torch.Generator("cuda").manual_seed(0), torch.Generator)
    words = f"{loss.item():.3f} {loss.detach().cpu().numpy()} {start.elapsed_time(end)} {torch.cuda.memory_summary()}"
    assert words == "0.000 0.0 1.0 " and loss.tolist() == 0.0 and torch.cuda.FloatTensor(2, 3).is_cuda
    torch.distributed.barrier()


def test_what_a_script_asks_of_a_gpu_is_answered_and_pytorch_is_not():
    assert peak_of(lambda: loop(after=lines_for_a_gpu)) == peak_of(loop)
    with answers.answers("T4"):
        assert torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
        with pytest.warns(UserWarning, match="CUDA is not available"):  # PyTorch asks
            assert not torch.amp.GradScaler("cuda").is_enabled()
    assert not torch.cuda.is_available() or torch.cuda.is_initialized()
    with pytest.raises(NotPossible, match="a part of torch.cuda that is not answered here"):
        peak_of(lambda: loop(after=lambda loss: torch.cuda.CUDAGraph()))


@pytest.mark.parametrize("views", [False, True])
def test_ddp_of_one_process_has_buckets_as_large_as_the_gradients(views):
    ddp = nn.parallel.DistributedDataParallel

    def wrap(model):
        return nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=views)

    buckets = peak_of(lambda: loop(wrap=wrap)) - peak_of(loop)
    assert buckets == (0 if views else 4 * sum(p.numel() for p in Net().parameters()))
    assert nn.parallel.DistributedDataParallel is ddp


MODEL = Net()
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
SEEN = []


def of_globals():
    MODEL(torch.ones(64, 512)).backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
    SEEN.append(0)


def test_a_model_and_an_optimizer_may_be_globals_and_are_not_trained():
    before = MODEL.layers[0].weight.clone()
    peak = case_of(lambda: (MODEL, of_globals)).run(Plan()).peak
    assert peak["optimizer"] == 2 * peak["parameters"] + 4 * 4 and not SEEN and not OPTIMIZER.state
    assert torch.equal(MODEL.layers[0].weight, before) and MODEL.layers[0].weight.grad is None


class Blocks(nn.Module):
    """Three blocks and a head; all blocks may stand in one checkpoint."""

    def __init__(self, how):
        super().__init__()
        self.blocks, self.head, self.how = nn.Sequential(*(Net().layers for _ in range(3))), nn.Linear(512, 512), how

    def forward(self, x):
        options = {"use_reentrant": self.how == "reentrant"}
        return self.head(checkpoint(self.blocks, x, **options) if self.how else self.blocks(x)).mean()


class Heads(nn.Linear):
    """Attention of so many numbers a head, for which no kernel is made."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(*3 * [super().forward(x)]).mean()


def growing(of):
    kept = []
    return loop(after=lambda loss: kept.append(of(loss)))


SO_MANY = "Its optimizers step once in 3 calls of step(), so the step shown is 3 calls."
NEVER = "One of its optimizers does not step in 32 calls of step(), and has no states here."
GROWS = "It grows: 0.20 MiB more are held after each step, most of it from test_places.py:"
RECOMPUTED = "In backward 56.00 MiB of the peak are recomputed, of 5 modules at once: a checkpoint around each block"
IDLE = "No gradient comes to 12 of 14 trained tensors, such as blocks.0.0.weight: they are not used, or a checkpoint"
NOTES = [
    (lambda: loop(every=3), SO_MANY),
    (lambda: loop(every=100), NEVER),
    (lambda: growing(lambda loss: torch.ones(100, 512, device="cuda")), GROWS),
    (lambda: growing(lambda loss: loss.detach().clone()), "It grows: 4 bytes more are held after each step"),
    (lambda: (Blocks(""), torch.ones(4096, 512)), None),
    (lambda: (Blocks("all at once"), torch.ones(4096, 512)), RECOMPUTED),
    (lambda: (Blocks("reentrant"), torch.ones(4096, 512)), IDLE),
    (lambda: (Heads(63, 63), torch.ones(4, 8, 128, 63)), "Attention: FP32 with 63 numbers a head has no fused kernel"),
]


@pytest.mark.parametrize("make, words", NOTES)
def test_what_is_odd_in_a_step_is_told(make, words):
    report = Report(case_of(make, card="h100"))
    assert len(report.case.notes) == bool(words) and all(note.startswith(words) for note in report.case.notes)
    if words == SO_MANY:
        assert report.peak["total"] >= peak_of(loop)
    if words == GROWS:
        assert all(row.what[:4] != "None" for row in report.holders)
        assert any(row.what == "ones: 100 × 512" and row.tensors > 1 for row in report.holders)


def test_a_loop_keeps_its_mode():
    class NotInTraining(nn.Linear):
        def forward(self, x):
            assert not self.training
            return super().forward(x).mean()

    model = NotInTraining(8, 8).eval()
    case_of(lambda: (model, lambda: model(torch.ones(3, 8)).backward())).run(Plan())
    with pytest.raises(NotPossible):
        case_of(lambda: (model, torch.ones(3, 8))).run(Plan())


@pytest.fixture
def command(tmp_path, capfd):
    """Runs the command on a flat script with these lines at its end; returns its status, and what it says."""

    def run(last, *options):
        (tmp_path / "train.py").write_text(FLAT + last)
        status, said = main([str(tmp_path / "train.py"), *options]), capfd.readouterr()
        return status, " ".join((said.err if status else said.out).split())

    return run


def test_what_fit_tries_of_a_loop_is_told_and_what_it_leaves(command):
    status, out = command(MAKE, "--no-table", "--fit", "1MiB")
    assert status == 0 and "Tried: as it is 65.00 MiB" in out
    assert "loss in chunks: not possible: no linear layer leads" in out
    assert "make() has returned a loop. What changes a loop is not tried: smaller batches, BF16" in out
    status, error = command(MAKE, "--largest")
    assert status == 2 and "which makes its own batch" in error


FLAT = """import torch
model = torch.nn.Linear(8, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(4, 8, device="cuda")).mean().backward()
    optimizer.step()
"""
MAKE = "def make(): return model, step"
LINES = "a script that trains as it is read needs four lines: def step... above .* def make.*: return model, step"


@pytest.mark.parametrize(
    "last, words",
    [
        ("for _ in range(10): step()", rf"cannot be imported: {LINES} .train.py:6."),
        ("import nowhere", r"cannot be imported: No module named 'nowhere' .train.py:7."),
        ("import sys; sys.exit('no data')", r"cannot be imported: no data .train.py:7."),
        ("", rf"has no function make.*: {LINES}"),
    ],
)
def test_a_flat_script_is_told_the_lines_that_it_needs(last, words, command):
    status, error = command(last)
    assert status == 2 and re.search(words, error) and len(error) < 600


def test_what_others_have_of_the_card_is_left_to_them(command):
    options = "--no-table", "--card", "t4", "--fit", "--taken"
    status, out = command(MAKE, *options, "3GiB")
    assert status == 0 and "1 × 11.56 GiB: the cheapest" in out
    status, error = command(MAKE, *options, "15GiB")
    assert status == 2 and "--taken: 15.00 GiB of 14.56 GiB leaves nothing" in error
