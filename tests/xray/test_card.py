"""As on a card: PyTorch's choice of attention there, what a loop of the user's holds, and nothing left behind."""

import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flash.gpus import GPUS
from minizero.torch_private import registered
from minizero.xray import Plan
from minizero.xray.budget import kept_free, largest
from minizero.xray.card import as_on, backend, card_of, rules
from minizero.xray.case import Case, case_of
from minizero.xray.fake import ALONE, pretend
from tests.support import kernel_choice
from tests.support.processes import printed_by

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Compute capability, dtype, heads of queries and of keys, numbers a head in keys and in values, what else; the kernel
# up to PyTorch 2.13, and since 2.14. These are answers of PyTorch's own functions, asked as kernel_choice.py does.
CHOICES = [
    ((9, 0), BF16, (8, 8), (64, 64), "", "cudnn", "cudnn"),
    ((9, 0), BF16, (8, 2), (64, 64), "", "math", "math"),
    ((9, 0), BF16, (8, 2), (64, 64), "gqa", "cudnn", "cudnn"),
    ((9, 0), BF16, (8, 2), (64, 64), "gqa, mask", "cudnn", "cudnn"),
    ((9, 0), BF16, (8, 8), (192, 192), "", "cudnn", "flash"),
    ((9, 0), BF16, (8, 8), (192, 192), "no gradients", "cudnn", "cudnn"),
    ((9, 0), BF16, (8, 8), (256, 256), "", "cudnn", "cudnn"),
    ((9, 0), BF16, (8, 8), (192, 128), "", "cudnn", "cudnn"),
    ((10, 0), BF16, (8, 8), (192, 128), "", "cudnn", "cudnn"),
    ((9, 0), FP32, (8, 8), (64, 64), "dropout", "efficient", "efficient"),
    ((9, 0), FP32, (8, 2), (64, 64), "gqa", "math", "efficient"),
    ((9, 0), FP32, (8, 1), (64, 64), "", "math", "efficient"),
    ((9, 0), FP32, (8, 8), (63, 63), "", "math", "math"),
    ((8, 0), FP16, (8, 8), (64, 64), "dropout, causal", "flash", "flash"),
    ((8, 0), FP16, (8, 8), (64, 64), "mask", "efficient", "efficient"),
    ((8, 9), BF16, (8, 8), (256, 256), "dropout", "efficient", "efficient"),
    ((8, 9), BF16, (8, 8), (208, 208), "", "efficient", "efficient"),
    ((8, 9), BF16, (8, 8), (208, 208), "no gradients", "flash", "flash"),
    ((7, 5), FP16, (8, 8), (64, 64), "", "efficient", "efficient"),
    ((7, 5), BF16, (8, 8), (64, 64), "", "math", "math"),
]


@pytest.mark.parametrize("capability, dtype, heads, size, kind, before, since", CHOICES)
def test_attention_is_the_kernel_that_pytorch_chooses(capability, dtype, heads, size, kind, before, since, monkeypatch):
    given = kernel_choice.arguments(dtype, heads, size, kind, "meta")
    for new, expected in enumerate((before, since)):
        monkeypatch.setattr("minizero.xray.card.SINCE_2_14", bool(new))
        assert backend(SimpleNamespace(capability=capability), *given) == expected


NAMES = {
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "RTX3090": "RTX 3090",
    "2080ti": "RTX 2080 Ti",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "a100": "A100 SXM 80GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "A10G": "no card 'A10G' is known",
    "H100 PCIe": "no card",
    "NVIDIA": "no card",
    "RTX": "may be RTX 2080 Ti, .*: say which",
    "sxm": "may be V100 SXM2, .*: say which",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_found_by_the_name_that_a_person_or_nvidia_smi_writes(name):
    if NAMES[name] in GPUS:
        assert card_of(name) == NAMES[name]
    else:
        with pytest.raises(ValueError, match=NAMES[name]):
            card_of(name)


def test_what_is_usable_is_a_little_less_than_what_is_sold():
    assert all(0.9 < made.usable * 2**30 / made.memory < 1 for made in GPUS.values() if made.threads)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(layer(x), 0.5)
        return F.scaled_dot_product_attention(x, x, x).exp().mean()


BATCH = torch.ones(4, 8, 128, 64)


def test_dropout_keeps_bytes_and_attention_no_scores_and_autocast_is_cudas():
    on_cpu, on_card = (Case(Net(), BATCH, card=card).run(Plan()) for card in (None, "h100"))
    # A byte in place of a float. Attention keeps the same on both, and on a card its seed.
    assert on_cpu.peak["activations"] - on_card.peak["activations"] == 3 * 3 * BATCH.numel() - 16

    class Half(Net):
        def forward(self, x):
            with torch.autocast("cuda", BF16):
                return super().forward(x)

    half = Case(Half(), BATCH, card="h100")
    assert half.run(Plan()).peak["activations"] < on_card.peak["activations"]
    assert half.run(Plan(recompute=True)).peak  # a second forward is under the same autocast
    assert (torch.ops.aten.exp.default, "up", "") in [*rules()]


def results():
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    q = x.reshape(1, 1, 4, 8)
    with torch.autocast("cpu", BF16):
        y = F.layer_norm(x.bfloat16(), (8,)), F.dropout(x, 0.5), F.rms_norm(x, (8,)), x.exp() @ x.T
        z = F.scaled_dot_product_attention(q, q, q), torch.fft.fft(x.bfloat16()).real, F.pad(x[None], (1, 1), "reflect")
    return [*y, *z, torch.autograd.grad(sum(t.float().sum() for t in (*y, *z)), x)[0]]


def test_other_threads_compute_as_before_and_all_is_given_back():
    before, meanwhile, kernels = results(), [], registered("AutocastCPU")
    with pretend(), as_on("H100 SXM", set()):
        assert "aten::exp" in registered("AutocastCPU") - kernels
        thread = threading.Thread(target=lambda: meanwhile.extend([*results(), ALONE.acquire(blocking=False)]))
        thread.start()
        thread.join()
    assert registered("AutocastCPU") == kernels and not meanwhile.pop()
    for found in (meanwhile, results()):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, found, strict=True))


def in_backward():
    model = Net()
    optimizers = {parameter: torch.optim.SGD([parameter], momentum=0.9) for parameter in model.parameters()}

    def step_and_forget(parameter, *, optimizers=optimizers):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_forget)
    return model, lambda model, x=BATCH: model(x).backward()  # what has a default is not given the model


TEACHER = nn.Linear(64, 64)


class Kept(Net):
    """It keeps what no module registers, and uses what is global."""

    def __init__(self):
        super().__init__()
        self.table, self.average, self.lock = torch.ones(100), [nn.Linear(10, 10)], threading.Lock()
        self.draws = torch.Generator()

    def forward(self, x):
        return super().forward(x) + TEACHER(x).detach().mean()


def with_optimizer():
    model = Net()
    return model, BATCH, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


LAYER = 4 * 65 * 64  # bytes of parameters
KEPT = 4 * 100 + 4 * 11 * 10 + LAYER
HELD = [
    (in_backward, Plan(), "gradients", 0),  # each is gone before the next comes
    (in_backward, Plan(), "optimizer", 3 * LAYER),
    (lambda: (Kept(), BATCH), Plan(), "buffers", KEPT),
    (lambda: (Kept(), BATCH), Plan(recompute=True), "buffers", KEPT),
    (with_optimizer, Plan(), "optimizer", 3 * LAYER),
    (with_optimizer, Plan(stage=2, ranks=2), "optimizer", 3 * LAYER // 2),
    (lambda: (Net(), BATCH, torch.optim.Adafactor), Plan(), "optimizer", 3 * 4 * (64 + 64 + 1 + 64 + 1)),
    (with_optimizer, Plan(eight_bit=True), "optimizer", 2 * 3 * (64 * 64 + 4 * 16 + 4 * 64)),
]


@pytest.mark.parametrize("make, plan, category, held", HELD)
def test_what_a_step_holds_is_what_can_be_counted_by_hand(make, plan, category, held):
    assert case_of(make).run(plan).peak[category] == held


def test_frozen_matrices_in_four_bits():
    model = Net().requires_grad_(False)
    model.layers[2].requires_grad_(True)
    plain, small = (Case(model, BATCH).run(Plan(four_bit=bits)).peak for bits in (False, True))
    assert plain["parameters"] + plain["buffers"] - small["parameters"] - small["buffers"] == 2 * (4 * 4096 - 2048 - 65)
    there = case_of(lambda: (model.to("cuda"), BATCH.cuda()), card="h100")
    assert there.run(Plan(four_bit=True)).peak["host"] < 64  # an optimizer's counters of steps


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    case, budget = Case(Net(), BATCH), 100 * 2**20
    most = largest(case, budget, Plan())
    peaks = [Case(Net(), torch.ones(n, 8, 128, 64)).run(Plan()).peak["total"] for n in (most, most + 1)]
    assert peaks[0] <= budget - kept_free(budget) < peaks[1]


@pytest.mark.slow
def test_a_pytorch_for_cuda_takes_the_same_kernels(tmp_path):
    """Its own functions are asked, for each version that somebody runs this with."""
    if torch.version.cuda is None or not (compiler := shutil.which("g++")):
        pytest.skip("needs a PyTorch that is built for CUDA, and g++; CHOICES has answers of such ones")
    headers = next(Path(torch.__file__).parent.parent.glob("triton/backends/nvidia/include"))
    shim, support = tmp_path / "shim.so", Path(kernel_choice.__file__).with_suffix(".cpp")
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{headers}", support, "-o", shim], check=True, timeout=100)
    assert printed_by(kernel_choice.__name__, shim, LD_PRELOAD=str(shim)) == ""
