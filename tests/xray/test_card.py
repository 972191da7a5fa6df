"""As on a card: PyTorch's choice of attention there, what a loop of the user's holds, and nothing left behind."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flash.gpus import GPUS
from minizero.torch_private import registered
from minizero.xray import Plan
from minizero.xray.card import as_on, backend, card_of, rules
from minizero.xray.case import Case, NotPossible, case_of
from minizero.xray.fake import ALONE, pretend
from minizero.xray.fit import kept_free, largest

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# card, dtype, heads of queries and of keys, numbers a head, a mask, dropout: the kernel. After sdp_utils.cpp.
CHOICES = [
    ("h100", BF16, 8, 8, 64, False, 0.0, "cudnn"),
    ("h100", BF16, 8, 2, 64, False, 0.0, "cudnn"),
    ("h100", BF16, 8, 8, 256, False, 0.0, "flash"),
    ("a100", FP16, 8, 8, 64, False, 0.1, "flash"),
    ("a100", FP16, 8, 8, 64, True, 0.0, "efficient"),
    ("h200", FP32, 8, 8, 64, False, 0.1, "efficient"),
    ("h200", FP32, 8, 2, 64, False, 0.0, "math"),
    ("h200", FP32, 8, 8, 63, False, 0.0, "math"),
    ("t4", FP16, 8, 8, 64, False, 0.0, "efficient"),
    ("t4", BF16, 8, 8, 64, False, 0.0, "math"),
    ("4090", BF16, 8, 8, 256, False, 0.1, "efficient"),
]


@pytest.mark.parametrize("card, dtype, heads, keys, d, masked, p, kind", CHOICES)
def test_attention_is_the_kernel_that_pytorch_chooses(card, dtype, heads, keys, d, masked, p, kind):
    q, k = (torch.empty(2, n, 32, d, dtype=dtype, device="meta") for n in (heads, keys))
    mask = torch.empty(2, 1, 32, 32, dtype=dtype, device="meta") if masked else None
    assert backend(GPUS[card_of(card)], q, k, k, mask, p, False, True) == kind


class Net(nn.Module):
    """Linear layers, dropout, attention, a norm."""

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


def test_no_fused_kernel_is_told_in_words():
    case = Case(Net(), BATCH, card="h100")
    case.inputs, case.model.layers = torch.ones(4, 8, 128, 63), nn.ModuleList([nn.Linear(63, 63)])
    case.run(Plan())
    assert "FP32 with 63 numbers a head has no fused kernel on this card: each layer keeps" in case.notes.pop()


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


def loop(ema=False):
    model = Net().to("cuda")
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a function of its own around optimizer.step
    average = copy.deepcopy(model) if ema else None
    x = BATCH.to("cuda:0")

    def step():
        loss = model(x.clone())
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item(), average

    return model, step


def test_a_loop_of_the_users_holds_what_ours_does_and_its_average():
    ours = Case(Net(), BATCH).run(Plan())
    theirs, averaged = (case_of(lambda ema=ema: loop(ema)) for ema in (False, True))
    plain = theirs.run(Plan())
    assert [plain.peak[name] for name in ("parameters", "gradients", "optimizer")] == [
        ours.peak[name] for name in ("parameters", "gradients", "optimizer")
    ]
    # The loop keeps its batch, and a scaler a few numbers.
    assert 0 <= plain.peak["total"] - ours.peak["total"] - BATCH.nbytes < 64
    assert averaged.run(Plan()).peak["total"] == plain.peak["total"] + ours.peak["parameters"]
    with pytest.raises(NotPossible, match="it changes the loop"):
        theirs.run(Plan(stage=3, ranks=4))


def in_backward():
    model, x = Net(), BATCH
    optimizers = {parameter: torch.optim.SGD([parameter], momentum=0.9) for parameter in model.parameters()}

    def step_and_forget(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_forget)
    return model, lambda: model(x).backward()


def test_an_optimizer_in_backward_steps():
    peak = case_of(in_backward).run(Plan()).peak
    assert peak["gradients"] <= 4 * 65 * 64 and peak["optimizer"] == peak["parameters"] == 3 * 4 * 65 * 64


TEACHER = nn.Linear(64, 64)


def test_what_no_module_registers_and_what_is_global_is_counted():
    class Kept(Net):
        def __init__(self):
            super().__init__()
            self.table, self.average, self.lock = torch.ones(100), [nn.Linear(10, 10)], threading.Lock()
            self.draws = torch.Generator()

        def forward(self, x):
            return super().forward(x) + TEACHER(x).detach().mean()

    case = case_of(lambda: (Kept(), BATCH))
    assert case.run(Plan()).peak["buffers"] == 400 + 440 + 4 * 65 * 64
    assert case.run(Plan(recompute=True)).peak["buffers"] == case.run(Plan()).peak["buffers"]


def test_an_optimizer_may_be_made_with_the_model():
    def make():
        model = Net()
        return model, BATCH, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    case = case_of(make)
    assert case.run(Plan()).peak["optimizer"] == 4 * case.parameters
    assert case.run(Plan(stage=2, ranks=2)).peak["optimizer"] == 2 * case.parameters
    assert case.run(Plan(eight_bit=True)).peak["optimizer"] == 2 * 3 * (64 * 64 + 4 * 16 + 4 * 64)
    assert Case(Net(), BATCH, torch.optim.Adafactor).run(Plan()).peak["optimizer"] < 4 * case.parameters


def test_frozen_matrices_in_four_bits():
    model = Net().requires_grad_(False)
    model.layers[2].requires_grad_(True)
    plain, small = (Case(model, BATCH).run(Plan(four_bit=bits)).peak for bits in (False, True))
    assert plain["parameters"] + plain["buffers"] - small["parameters"] - small["buffers"] == 2 * (
        4 * 4096 - 2048 - 65 - 4
    )


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    case, budget = Case(Net(), BATCH), 100 * 2**20
    most = largest(case, budget, Plan())
    peaks = [Case(Net(), torch.ones(n, 8, 128, 64)).run(Plan()).peak["total"] for n in (most, most + 1)]
    assert peaks[0] <= budget - kept_free(budget) < peaks[1]
