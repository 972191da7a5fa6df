"""Find the bug. The function below says that it trains as ZeRO-2 does. It runs, and its loss falls. Its parameters are
those of one process, it sends what ZeRO-2 sends, and the optimizer of each rank sees 1/N of the gradients. No number of
the training is wrong. Yet a ledger shows that it is ZeRO-1.

nanochat, Andrej Karpathy's "best ChatGPT that $100 can buy", had this in its optimizer, which is "ZeRO-2 style" by its
own words. In February 2026 a reader found that the gradient memory is "closer to ZeRO-1": training calls "standard
loss.backward() followed by optimizer.step(), so each rank holds full (unsharded) gradients". The values are the same
either way, so no loss shows it. The report asked for other words; you change the code.

    the issue               https://github.com/karpathy/nanochat/issues/566
    the optimizer           https://github.com/karpathy/nanochat/blob/master/nanochat/optim.py
    the stages              https://arxiv.org/abs/1910.02054, section 5

What was made smaller: nanochat's optimizer is Muon for matrices and AdamW for the rest, in three phases that overlap;
here it is SGD with momentum, one message after the other. What matters is alike: reduce-scatter, step on a chunk,
all-gather, all of it after backward.

Predict before you look: 4 ranks, and a model whose parameters have 400 KiB in FP32. How many KiB of gradients does a
rank hold when backward ends, in ZeRO-1 and in ZeRO-2?

Run the check first: it says what the numbers are. Then read the function line by line, and mend it.
"""

import copy
import itertools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from minizero.memory import Ledger
from tests.exercises.bug_kit import fell
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, fail, lent, ranks, recognise, size, wrong
from tests.exercises.tasks import bug_zero2

PLAN = [
    "What must hold: while backward goes on, a rank holds its chunks of the averaged gradients that have come, and one "
    "full gradient, of the parameter whose turn it is.",
    "The parameters after each step are those of one process with the whole batch.",
    "A rank sends (N-1)/N of the gradients in a step, and as much of the parameters.",
    "The model is left as it came, but for its parameters: what you hang on it, take off again at the end.",
]
HINTS = [
    "At which moment are the most gradients alive? Which lines of the function run before it, and which after?",
    "A gradient can be reduced as soon as backward has made it. Backward is one call here: so something must be "
    "called in the middle of it, by parameter.register_post_accumulate_grad_hook(f). And when a gradient was reduced, "
    "who still refers to the full one?",
    "parameter.register_post_accumulate_grad_hook(f) lets backward call f(parameter) as soon as its gradient is there. "
    "It returns a handle with .remove(). In f, parameter.grad = None lets go of the gradient.",
]
AFTER = (
    "DeepSpeed and FSDP reduce inside backward, too, in buckets of some 100 MB, so that there are fewer messages. "
    "What nanochat saves by its way is a hook for each parameter; with a card that has room for the gradients, ZeRO-1 "
    "is no mistake. Only the name was. With several micro-batches the choice comes back: ZeRO-2 sends in each of them, "
    "or keeps what it wanted to save. Read next: minizero/engines/zero2.py, beside zero1.py, and "
    '"When does ZeRO-2 pay?" in notebooks/02c_zero_choices.ipynb.'
)
TAKEAWAY = "Right values say nothing about memory: which stage a code is, only the bytes at the end of backward show."
BUGGY = (
    (
        '        shards[parameter].grad = reduce_scatter(full, comm, "mean")\n        parameter.grad = None\n',
        '        shards[parameter].grad = reduce_scatter(full, comm, "mean")\n',
    ),
    ("    hooks = [parameter.register_post_accumulate_grad_hook(reduce) for parameter in shards]\n", ""),
    (
        "        loss.backward()\n        losses.append(loss.item())\n",
        "        loss.backward()\n        losses.append(loss.item())\n        for parameter in shards:\n"
        "            reduce(parameter)\n",
    ),
    ("        optimizer.zero_grad()\n    for hook in hooks:\n        hook.remove()\n",
     "        optimizer.zero_grad()\n        model.zero_grad()\n"),
)  # fmt: skip
REDUCE = 'reduce_scatter(full, comm, "mean")'
NONE, HOOKS, AFTER_BACKWARD, REMOVE = "        parameter.grad = None\n", BUGGY[1], BUGGY[2], BUGGY[3]
ZERO = ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        model.zero_grad()\n")
WRONG = [
    wrong("is-zero1", *BUGGY),
    wrong("too-late", HOOKS, AFTER_BACKWARD, (REMOVE[0], "        optimizer.zero_grad()\n")),
    wrong("keeps-the-full", (NONE, ""), ZERO),
    wrong("keeps-a-view", (f"shards[parameter].grad = {REDUCE}", "mine = full.chunk(comm.size)[comm.rank]\n"
          f"        shards[parameter].grad = mine.copy_({REDUCE})")),
    wrong("forgot-divide", (REDUCE, REDUCE.replace('"mean"', '"sum"'))),
    wrong("no-communication", (REDUCE, "full.chunk(comm.size)[comm.rank].clone()")),
    wrong("sends-everything", (REDUCE, "all_gather(reduce_scatter(full, comm, 'mean'), comm).chunk(comm.size)"
                                       "[comm.rank].clone()")),
    wrong("hooks-stay", ("    for hook in hooks:\n        hook.remove()\n", "")),
]  # fmt: skip
RATE, WIDTH, LAYERS = 2.0, 64, 25  # 400 KiB of parameters in FP32, 16 a layer


class Model(nn.Module):
    """Many equal layers, so that one gradient is little beside all of them.

    watch: called near the end of each backward, when only the first layer is left.
    """

    def __init__(self, width: int, layers: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.randn(width, width, generator=generator, dtype=torch.float64).to(dtype) / width**0.5
            for _ in range(layers)
        )
        self.watch: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + (x @ layer).tanh() / len(self.layers)
            if number == 0:
                x.register_hook(lambda _: self.watch())
        return F.mse_loss(x, y)


class Run(NamedTuple):
    """Of a rank. most: bytes at the peak, but for the parameters, this rank's chunk of them, and its momentum.

    alive, in_backward: near the end of the last backward, the full gradients that are alive, and the bytes sent in it.
    sent: bytes in all. free: of the parameters, how many keep their gradient in a backward after the run.
    """

    losses: list[float]
    parameters: torch.Tensor
    most: int
    alive: int
    in_backward: int
    sent: int
    free: int


def train(comm, model, batches, rate):
    model = lent(model)
    parts = [tuple(both.chunk(comm.size)[comm.rank] for both in batch) for batch in batches]
    start, seen = comm.bytes_sent, [0, 0, 0]  # sent before the last backward; alive, sent in it

    def watched():
        for part in parts:
            seen[0] = comm.bytes_sent
            yield part

    def watch():
        seen[1:] = sum(p.grad is not None for p in model.parameters()), comm.bytes_sent - seen[0]

    model.watch = watch
    with Ledger(model) as ledger:
        losses = bug_zero2.train_zero2(model, watched(), rate, comm)
    parameters, sent = parameters_to_vector(model.parameters()).detach(), comm.bytes_sent - start
    psi = parameters.nbytes
    found = Run(losses, parameters, ledger.peak["total"] - psi - 2 * psi // comm.size, seen[1], seen[2], sent, 0)
    model.zero_grad()
    model(*parts[0]).backward()
    return found._replace(free=sum(p.grad is not None for p in model.parameters()))


def on_one_process(model: nn.Module, batches: Any, rate: float) -> tuple[list[float], torch.Tensor]:
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, parameters_to_vector(model.parameters()).detach()


def data(width: int, size: int, steps: int, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """The same batch in each step, to be learnt by heart: the numbers of x, the other way round."""
    x = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
    return [(x, x.flip(1))] * steps


def check() -> None:
    generator = torch.Generator().manual_seed(0)
    model = Model(WIDTH, LAYERS, torch.float32, generator)
    batches = data(WIDTH, 8, 6, torch.float32, generator)
    want_losses, want = on_one_process(model, batches, RATE)
    runs = ranks(4, train, model, batches, RATE)
    psi = 4 * len(want)
    for rank, run in enumerate(runs):
        if not run.parameters.equal(runs[0].parameters):
            fail(
                "ranks-differ", f"Rank {rank} ends with other parameters than rank 0: whole on all ranks, and the same."
            )
    one_step()
    start = parameters_to_vector(model.parameters()).detach()
    away = float((runs[0].parameters - want).norm() / (want - start).norm())
    if away > 0.01:
        fail("values", f"After {len(batches)} steps the parameters are {away:.0%} of their way off.")
    means = torch.tensor([run.losses for run in runs]).mean(0)
    recognise(means, torch.tensor(want_losses), {}, "The losses, as the mean over the ranks", 1e-3)
    memory(runs[0], psi, f"{fell(want_losses)} in {len(batches)} steps, as on one process")
    enough = len(batches) * 2 * psi * 3 // 4
    if runs[0].sent > 1.02 * enough:
        fail(
            "sends-everything",
            f"Rank 0 sent {size(runs[0].sent)} in {len(batches)} steps, and {size(enough)} are enough: a rank "
            "needs its own chunk of the averaged gradient only.",
        )
    if runs[0].free < LAYERS:
        fail(
            "hooks-stay",
            f"In a backward after the run {LAYERS - runs[0].free} of {LAYERS} parameters get no gradient: "
            "something still hangs on the model. Remove it at the end.",
        )


def one_step() -> None:
    """Three layers, with a learning rate of 1: what the parameters move by is minus the gradient."""
    generator = torch.Generator().manual_seed(1)
    model, batches = Model(8, 3, torch.float32, generator), data(8, 8, 1, torch.float32, generator)
    start = parameters_to_vector(model.parameters()).detach()
    gradient = start - on_one_process(model, batches, 1.0)[1]
    for rank, run in enumerate(ranks(4, train, model, batches, 1.0)):
        enough = 2 * 4 * len(start) * 3 // 4
        if run.sent < 0.75 * enough:
            fail(
                "no-communication",
                f"Rank {rank} sent {size(run.sent)} in a step, and needs {size(enough)}: as much for the "
                "averages of the gradients as for the parameters.",
            )
        mistakes = {"forgot-divide": (4 * gradient, "A step is 4 times too large on 4 ranks: take the mean.")}
        recognise(start - run.parameters, gradient, mistakes, f"The first step of rank {rank}, at a rate of 1", 1e-3)


def memory(run: Run, psi: int, before: str) -> None:
    """On 4 ranks: ZeRO-1 has ψ of full gradients at the end of backward, and ψ/4 of averages after it."""
    if run.most < 0.75 * psi:
        return
    said = f"{before}. But on 4 ranks the ledger's peak has {size(run.most)} more than {size(psi)} of parameters, the "
    said += "chunks that the optimizer updates, and their momentum"
    one = f"one full gradient, {size(psi // LAYERS)} at most"
    should = f"In ZeRO-2 the gradients are {size(psi // 4)} of averages, and {one}"
    if not run.in_backward and run.most > 1.2 * psi:
        fail(
            "is-zero1",
            f"{said}: {size(psi)} of full gradients, {size(psi // 4)} of averages, {size(run.most - psi - psi // 4)} "
            f"of the last message and the batch. {should}. In backward nothing was sent, so nothing could be freed.",
        )
    said += f", of which {size(psi)} are all full gradients. {should}"
    if not run.in_backward:
        fail("too-late", f"{said}. The full ones are freed now, but after backward: the peak is over by then.")
    if run.alive > 1:
        fail(
            "keeps-the-full",
            f"{said}. They are reduced in backward now. But {run.alive} of {LAYERS} parameters still have their full "
            "gradient near its end: let go of it.",
        )
    fail(
        "keeps-a-view",
        f"{said}. No parameter has its full gradient any more, but something else still refers to it: a list, or a "
        "view, which keeps the whole memory.",
    )


class Case(NamedTuple):
    ranks: int
    width: int
    layers: int
    steps: int
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product((1, 2, 3, 4), (5, 16)), (6, 5)]
    return [Case(*row) for row in deal(random, ways, [2, 12], [1, 3, 20], [torch.float32, torch.float64])]


def result(case: Case) -> Any:
    generator = torch.Generator().manual_seed(case.seed)
    model = Model(case.width, case.layers, case.dtype, generator)
    batches = data(case.width, 12, case.steps, case.dtype, generator)
    runs = ranks(case.ranks, train, model, batches, RATE)
    seen: dict[str, Any] = {
        "ranks that end with other bits than rank 0": sum(not r.parameters.equal(runs[0].parameters) for r in runs),
        "norm of the parameters": float(runs[0].parameters.double().norm()),
    }
    for rank, run in enumerate(runs):
        meters = {"peak": AtMost(run.most + run.parameters.nbytes, 1.3), "sent": AtMost(run.sent, 1.05)}
        seen[f"rank {rank}"] = {"losses": run.losses, "bytes": meters, "parameters that keep a gradient": run.free}
    return seen


def tolerance(case: Case) -> float:
    return 1e-4 if case.dtype == torch.float32 else 1e-9
