"""FP16 has 11 significant bits. An update smaller than half of a weight's last place vanishes when the sum is
rounded: the weight stays as it was, however many such updates come. `round_weights` is what makes an FP32 model
a model of FP16 weights; with it the package trains a classifier twice, with FP32 masters and without, and
counts the updates that are lost.

    1 + 2^-12 = 1 in FP16: the next number after 1 is 1 + 2^-10
"""

import torch
from torch import nn

from minizero.mixed_precision import experiments
from tests.exercises.kit import fail, recognise, wrong

PLAN = [
    "For each parameter of the model: round its values to FP16, to nearest, and put them back into the same FP32 "
    "tensor.",
]
HINTS = [
    "FP16.quantize(x) gives the nearest FP16 numbers, in x's own dtype.",
    "parameter.copy_(values) writes in place; the decorator has turned autograd off for it.",
]
LINE = "parameter.copy_(FP16.quantize(parameter))"
WRONG = [
    wrong("rounds-a-copy", (LINE, "parameter = FP16.quantize(parameter)")),
    wrong("rounds-the-gradients", (LINE, "parameter.grad.copy_(FP16.quantize(parameter.grad))")),
    wrong("cuts-off", (LINE, 'parameter.copy_(FP16.quantize(parameter, "toward-zero"))')),
    wrong("rounds-to-bfloat16", (LINE, "parameter.copy_(parameter.bfloat16())")),
    wrong("changes-the-dtype", (LINE, "parameter.data = parameter.half()")),
    wrong("matrices-only", (LINE, f"if parameter.dim() > 1:\n            {LINE}")),
]


def check() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    with torch.no_grad():
        model.weight.view(-1)[:3] = torch.tensor([1 + 2.0**-12, 1 + 3 * 2.0**-12, 1e-9])
    model(torch.randn(5, 40)).square().sum().backward()
    before = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        before[name] = p.detach().clone(), p.grad.clone()
    experiments.round_weights(model)
    for name, p in model.named_parameters():
        weight, gradient = before[name]
        if p.dtype != torch.float32:
            fail("changes-the-dtype", f"The weights are {p.dtype} now; the tensors must stay FP32, with FP16 values.")
        if p.grad is None or not torch.equal(p.grad, gradient):
            fail("rounds-the-gradients", "The gradients were changed. It is the weights that are to be rounded.")
        if name == "bias" and torch.equal(p.detach(), weight):
            fail("matrices-only", "The weight matrix was rounded and the bias was not: a bias is a parameter too.")
        cut = weight.half().float()
        cut = torch.where(cut.abs() > weight.abs(), torch.nextafter(weight.half(), torch.zeros(()).half()).float(), cut)
        mistakes = {
            "rounds-a-copy": (
                weight,
                "The weights are as before: write the rounded values into the parameter, in place.",
            ),
            "rounds-to-bfloat16": (weight.bfloat16().float(), "The weights have 8 significant bits: that is bfloat16."),
        }
        low = p.detach().abs() <= weight.abs()
        if (
            bool(low.all())
            and not torch.equal(p.detach(), weight)
            and not torch.equal(p.detach(), weight.half().float())
        ):
            if (p.detach() - weight.half().float()).abs().max() < 2e-3:
                fail("cuts-off", "All weights became smaller or stayed: they were cut off. Round to nearest.")
        recognise(p.detach(), weight.half().float(), mistakes, "The rounded weights")
    lost = [experiments.train_classifier(masters, steps=10).lost for masters in (True, False)]
    if not (lost[0] == 0 and lost[1] > 0.3):
        fail(
            "values", f"With masters {lost[0]:.0%} of the updates are lost, without {lost[1]:.0%}: expected 0 and many."
        )
