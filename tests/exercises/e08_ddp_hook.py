"""Data parallelism, stage 0: each rank computes the gradient of its own part of the batch, and all apply the
average. The engine calls `reduce(unit, gradient)` in the middle of backward, as soon as a unit's gradient is
complete on this rank: `gradient` is flat, as long as unit.size. Afterwards the optimizer must find the average
over all ranks in .grad.

    self.comm                       the ranks
    self.in_order                   the units, in the order in which they are reduced
    unit.set_gradient(g, full=g)    makes g what the optimizer sees

The package puts the gradients of several units into one message, a bucket of 25 MiB: a message costs time
however short it is. A message for each unit is a right answer too.
"""

from unittest import mock

import torch

from minizero import DDP
from tests.exercises.kit import fail, ranks, recognise, size, wrong
from tests.exercises.training import PSI, check_training, local_gradients, one_step, train

PLAN = [
    "Average `gradient` over the ranks: all_reduce(gradient, self.comm, …). It is yours: it may be overwritten.",
    "unit.set_gradient(averaged, full=averaged).",
    "(With a bucket: collect (unit, gradient) in a list that starts anew with self.in_order[0], and average all "
    "of them in one message when they are more than BUCKET_BYTES, or the unit is self.in_order[-1]. So that the "
    "bits are those of the other stages: view each as (comm.size, -1) and put them next to each other with "
    "torch.cat(…, dim=1).)",
]
HINTS = [
    'all_reduce(tensor, comm, "mean") returns the average of the ranks\' tensors.',
    "The simple answer has two lines: average; set_gradient.",
]
KEEP = "bucket.append((unit, gradient))"
CALL = "all_reduce(rows, self.comm, out=rows, label=unit.name)"
DIVIDE = "torch.div(columns, self.comm.size, out=view)"
WRONG = [
    wrong("forgot-divide", (DIVIDE, "view.copy_(columns)")),
    wrong("divides-twice", (DIVIDE, "torch.div(columns, self.comm.size**2, out=view)")),
    wrong("no-communication", (CALL, "pass"), (DIVIDE, "view.copy_(columns)")),
    wrong("reduces-the-weights", (KEEP, "bucket.append((unit, unit.replica.clone()))")),
    wrong("takes-the-largest", (CALL, 'all_reduce(rows, self.comm, "max", out=rows, label=unit.name)'),
          (DIVIDE, "view.copy_(columns)")),
    wrong("sends-everything", (CALL, "from minizero.ranks.collectives import all_gather\n        rows.copy_(all_gather("
          "rows, self.comm, label=unit.name).view(self.comm.size, *rows.shape).sum(0))")),
    wrong("sends-again", ("self.buckets.pop(dtype)", "self.buckets[dtype]")),
    wrong("divides-by-four", (DIVIDE, "torch.div(columns, 4, out=view)")),
    wrong("sends-fp32", (CALL, "rows.copy_(all_reduce(rows.float(), self.comm, label=unit.name))")),
    wrong("keeps-every-gradient", (KEEP, KEEP + '\n    self.__dict__.setdefault("all", []).append(gradient.clone())')),
    wrong("forgets-the-last", ("and unit is not self.in_order[-1]", "or True")),
]  # fmt: skip


def check() -> None:
    steps = ranks(4, one_step, DDP)
    local = local_gradients(4)
    mean = local.mean(0)
    for r, step in enumerate(steps):
        mistakes = {
            "forgot-divide": (
                mean * 4,
                "The gradient is the sum over the 4 ranks, 4 times too large: divide by their number.",
            ),
            "divides-twice": (mean / 4, "The gradient is 4 times too small: the sum was divided by 4 twice."),
            "no-communication": (
                local[r],
                f"Rank {r} uses its own gradient: the ranks drift apart. Average over them.",
            ),
            "takes-the-largest": (local.amax(0), "Each gradient is the largest of the ranks', not their mean."),
            "forgets-the-last": (
                mean * 0,
                "Nothing moved: the optimizer found no gradient. Call unit.set_gradient for every unit.",
            ),
        }
        if 0.9 < step.gradient.norm() / vector_of_weights().norm() < 1.1 and not near(step.gradient, mean):
            fail(
                "reduces-the-weights",
                "What was averaged are the weights, not the gradients: `unit.replica` holds parameters. "
                "Use `gradient`.",
            )
        recognise(step.gradient, mean, mistakes, f"The averaged gradient on rank {r}", tolerance=1e-4)
    sent = max(step.sent for step in steps)
    if sent > 1.2 * 2 * 4 * PSI * 3 / 4:
        fail(
            "sends-everything",
            f"A rank sent {size(sent)} for gradients of {size(4 * PSI)}: all-reduce needs 2 (N-1)/N times as "
            f"much, {size(2 * 4 * PSI * 3 / 4)}. Do not send every gradient to everybody.",
        )
    small = ranks(2, one_step, DDP)
    mistakes = {
        "divides-by-four": (
            local_gradients(2).mean(0) / 2,
            "On 2 ranks the gradient is half of the mean: divide by self.comm.size, not by 4.",
        )
    }
    recognise(small[0].gradient, local_gradients(2).mean(0), mistakes, "The gradient on 2 ranks", tolerance=1e-4)
    held = sum(steps[0].held[part] for part in ("gradients", "activations", "communication", "temporary"))
    if held > 1.5 * 4 * PSI:
        fail(
            "keeps-every-gradient",
            f"After backward {size(held)} are held for gradients of {size(4 * PSI)}: more than what the optimizer "
            "needs. Keep no second reference and no copy.",
        )
    half = max(step.sent for step in ranks(4, in_16_bits))
    if half > 0.6 * sent:
        fail(
            "sends-fp32",
            f"In 16 bits a rank sent {size(half)} in a step, in FP32 {size(sent)}: send the 16-bit gradients as they "
            "come, and it is half.",
        )
    again = "With small buckets more is sent: a bucket that was sent must be emptied."
    with mock.patch.dict(DDP.reduce.__globals__, {"BUCKET_BYTES": 1000}):  # each unit fills a bucket
        try:
            steps = ranks(4, one_step, DDP)
        except AssertionError:  # a unit refuses a second gradient
            fail("sends-again", again)
        recognise(steps[0].gradient, mean, {}, "The gradient, where each unit fills a bucket", tolerance=1e-4)
    if max(step.sent for step in steps) > 1.2 * sent:
        fail("sends-again", again)
    check_training(ranks(4, train, DDP, 2), "DDP")


def in_16_bits(comm):
    return one_step(comm, DDP, dtype=torch.bfloat16)


def vector_of_weights():
    from minizero import GPT
    from tests.exercises.training import SMALL, vector

    return vector(dict(GPT(SMALL).named_parameters()))


def near(a, b) -> bool:
    return bool((a - b).norm() < 1e-2 * b.norm())
