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

import itertools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from minizero.memory import Ledger
from tests.exercises.draws import deal
from tests.exercises.kit import AtMost, lent, ranks, wrong
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
NONE = "        parameter.grad = None\n"
ZERO = ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        model.zero_grad()\n")
WRONG = [
    wrong("is-zero1", "This is ZeRO-1: at the end of backward all full gradients are there, since nothing was sent in "
          "it, and nothing could be freed.", *BUGGY),
    wrong("keeps-the-full", "Gradients are reduced in backward, but near its end parameters still have their full "
          "gradient: let go of it.", (NONE, ""), ZERO),
    wrong("keeps-a-view", "No parameter has its full gradient any more, but something else still refers to it: a list, "
          "or a view, which keeps the whole memory.",
          (f"shards[parameter].grad = {REDUCE}",
           "mine = full.chunk(comm.size)[comm.rank]\n" f"        shards[parameter].grad = mine.copy_({REDUCE})")),
    wrong("forgot-divide", "The step is as many times too large as there are ranks: take the mean.",
          (REDUCE, REDUCE.replace('"mean"', '"sum"'))),
    wrong("no-communication", "A rank steps with its own gradient: nothing was averaged.",
          (REDUCE, "full.chunk(comm.size)[comm.rank].clone()")),
    wrong("sends-everything", "The numbers are right, and too many bytes go out: a rank needs its own chunk of the "
          "averaged gradient only.",
          (REDUCE, "all_gather(reduce_scatter(full, comm, 'mean'), comm).chunk(comm.size)[comm.rank].clone()")),
    wrong("hooks-stay", "In a backward after the run parameters get no gradient: something still hangs on the model. "
          "Remove it at the end.", ("    for hook in hooks:\n        hook.remove()\n", "")),
]  # fmt: skip
RATE = 2.0


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

    alive, in_backward: near the end of the last backward, the full gradients that are alive; the bytes sent in it.
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


def data(width: int, size: int, steps: int, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """The same batch in each step, to be learnt by heart: the numbers of x, the other way round."""
    x = torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)
    return [(x, x.flip(1))] * steps


class Case(NamedTuple):
    ranks: int
    width: int
    layers: int
    steps: int
    dtype: torch.dtype
    seed: int


def draw(random: Random) -> list[Case]:
    ways = [*itertools.product((1, 2, 3, 4), (5, 16)), (6, 5)]
    rows = deal(random, ways, [2, 12], [1, 3, 20], [torch.float32, torch.float64])
    return [Case(4, 32, 12, 2, torch.float32, 0), *map(Case._make, rows)]


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
        seen[f"rank {rank}"] |= {"full gradients near the end": run.alive, "sent in backward": AtMost(run.in_backward)}
    return seen


def tolerance(case: Case) -> float:
    return 1e-4 if case.dtype == torch.float32 else 1e-9
