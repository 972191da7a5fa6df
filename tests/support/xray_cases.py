"""Small models for the X-ray, and one step of each on real tensors: what a step on fake ones must equal."""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from minizero import GPT, GPTConfig, World
from minizero.models.networks import NETWORKS
from minizero.ranks.one_of_many import one_of_many
from minizero.xray.case import Case
from minizero.xray.plan import Plan
from minizero.xray.step import Result, measure, step
from tests.support.profiled import profiled

WORDS, WIDTH, LENGTH, BATCH = 320, 64, 32, 4
Make = Callable[[], tuple[nn.Module, Any]]
adamw = functools.partial(torch.optim.AdamW, lr=1e-4)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, WORDS, (BATCH, length))


class Does(nn.ModuleDict):
    """Layers by name, and what is done with them: `does(self, *inputs)`."""

    def __init__(self, does: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__(layers)
        self.does = does

    def forward(self, *inputs: Any) -> Any:
        return self.does(self, *inputs)


class WithLoss(Does):
    """A network of classes, and its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(lambda self, x, y: F.cross_entropy(self.network(x), y), network=network)


def lstm(batch_first: bool = True) -> nn.Module:
    """A language model whose layers one operator runs, with a reserve that no fake kernel knows."""

    def loss(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embedding(x))[0]).flatten(0, 1), y.flatten())

    layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=batch_first)
    return Does(loss, embedding=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, WORDS), lstm=layers)


def attention(width: int, **options: Any) -> nn.Module:
    """PyTorch's attention of a layer's result with itself."""
    one = nn.Linear(width, width)
    return Does(lambda self, x: F.scaled_dot_product_attention(*3 * [self.layer(x)], **options).mean(), layer=one)


def gpt(**options: Any) -> Make:
    config = GPTConfig(**dict(vocabulary=WORDS, sequence_length=LENGTH, width=WIDTH, layers=3, heads=4) | options)
    return lambda: (GPT(config), (tokens(config.sequence_length), tokens(config.sequence_length)))


def network(name: str) -> Make:
    return lambda: (WithLoss(NETWORKS[name]()), (torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))))


OWN: dict[str, Make] = {
    "GPT": gpt(),
    "GPT, tiled": gpt(attention="tiled"),
    "GPT, recompute": gpt(recompute="full"),
    "GPT, selective": gpt(recompute="selective"),
    "LSTM": lambda: (lstm(), (tokens(), tokens())),
    **{name: network(name) for name in NETWORKS},
}


def real(make: Make, plan: Plan, optimizer: Any = adamw) -> Result:
    """Rank 0's figures of a step with numbers, all ranks running."""
    torch.manual_seed(0)
    module, inputs = make()

    def run(comm: Any) -> Result:
        return measure(copy.deepcopy(module), inputs, plan, optimizer, comm).result()

    return run(one_of_many(1)) if plan.ranks == 1 else World(plan.ranks, "cpu").run(run)[0]


def fake(make: Make, plan: Plan, optimizer: Any = adamw) -> Result:
    """The same without numbers, one rank alone. As in a report, the plain step comes first."""
    case = Case(*make(), optimizer)
    case.run(Plan())
    return case.run(plan)


def allocated(make: Make, optimizer: Any = adamw) -> int:
    """The most bytes that the CPU's allocator has handed out in a step with numbers, scratch in operators included."""
    module, inputs = make()
    gc.collect()  # else what others have left is freed in between

    def build() -> Callable[[], None]:
        model = copy.deepcopy(module).train()
        return functools.partial(step, model, optimizer(model.parameters()), inputs, Plan())

    return profiled(build)[1]
