"""Three steps of AdamW, by an engine or by plain data parallelism; everything that comes out of them is one dict."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minizero import DDP, Comm, World, Zero1, Zero2, Zero3
from tests.real.real_models import MODELS, Batch, batches, model

VARIANTS: dict[str, Callable[..., Any]] = {
    "DDP": DDP,
    "Zero1": Zero1,
    "Zero2": Zero2,
    "Zero3": Zero3,
    "Zero3, prefetch=0": functools.partial(Zero3, prefetch=0),
    "Zero3, prefetch=3": functools.partial(Zero3, prefetch=3),
    "Zero3, reshard_after_forward=False": functools.partial(Zero3, reshard_after_forward=False),
    "Zero3, offload=True": functools.partial(Zero3, offload=True),
    "Zero3, sharding_factor=1": functools.partial(Zero3, sharding_factor=1),
    "Zero3, sharding_factor=2": functools.partial(Zero3, sharding_factor=2),
}
# Where a gradient is rounding and nothing else, as a key's bias has it, Adam's usual eps would make a step of it.
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
MAX_NORM = 0.1  # below the norms of all models: every step is clipped
Result = dict[str, torch.Tensor]  # the state at the end; "losses" and "norms" of all steps; the leaves' gradients


def nothing(module: nn.Module) -> None: ...


def on_this_rank(
    comm: Comm, name: str, variant: str, leaf: bool, change: Callable[[nn.Module], Any], dtype: torch.dtype | None
) -> Result:
    module = copy.deepcopy(model(name))
    change(module)
    engine = VARIANTS[variant](module, comm, dtype=dtype)
    optimizer = OPTIMIZER(engine.parameters())
    losses, norms, gradients = [], [], []
    for batch in batches(name, comm.size, leaf)[comm.rank]:
        batch = with_leaf(name, batch, leaf)
        loss = engine(**batch).loss
        loss.backward()
        norms.append(engine.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
        gradients.append(batch[MODELS[name].floating].grad if leaf else torch.ones(1))
    return result(engine.gather_state_dict(), losses, norms, gradients)


def by_engine(
    name: str,
    ranks: int,
    variant: str,
    leaf: bool = False,
    change: Callable[[nn.Module], Any] = nothing,
    dtype: torch.dtype | None = None,
) -> list[Result]:
    """Each rank's. change: what to do with the module before it is wrapped."""
    model(name), batches(name, ranks, leaf)  # made in this thread
    return World(ranks, device="cpu", timeout=60).run(on_this_rank, name, variant, leaf, change, dtype)


ddp = functools.cache(functools.partial(by_engine, variant="DDP"))  # (name, ranks, …): what the others must equal


@functools.cache
def by_hand(name: str, ranks: int, dtype: torch.dtype, leaf: bool = False) -> list[Result]:
    """Plain data parallelism: a copy for each rank, and between backward and step the mean of their gradients."""
    copies = [copy.deepcopy(model(name)).to(dtype) for _ in range(ranks)]
    if dtype == torch.float64 and name == "Mixtral":  # PyTorch's grouped products of matrices know no FP64
        for module in copies:
            module.set_experts_implementation("eager")
    trained = [[p for p in module.parameters() if p.requires_grad] for module in copies]
    optimizers = [OPTIMIZER(parameters) for parameters in trained]
    losses, norms, gradients = [[[] for _ in range(ranks)] for _ in range(3)]
    for step in zip(*batches(name, ranks, leaf)):
        for rank, (module, batch) in enumerate(zip(copies, step)):
            batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
            batch = with_leaf(name, batch, leaf)
            loss = module(**batch).loss
            loss.backward()
            losses[rank].append(loss.detach())
            gradients[rank].append(batch[MODELS[name].floating].grad if leaf else torch.ones(1))
        for same in zip(*trained):
            # With a leaf in place of the tokens nobody uses the embedding: the engines' gradient of it is zero.
            mean = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in same) / ranks
            for parameter in same:
                parameter.grad = mean.clone()
        for rank, optimizer in enumerate(optimizers):
            norms[rank].append(nn.utils.clip_grad_norm_(trained[rank], MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    # Buffers are rank 0's, as an engine gathers them.
    return [result(copies[0].state_dict(), *of_a_rank) for of_a_rank in zip(losses, norms, gradients)]


def with_leaf(name: str, batch: Batch, leaf: bool) -> Batch:
    key = MODELS[name].floating
    return batch | {key: batch[key].clone().requires_grad_()} if leaf else batch


def result(state: Result, losses: list[Any], norms: list[Any], gradients: list[Any]) -> Result:
    # Without the names that a wrapper around a block adds.
    state = {name.replace(".module.", "."): value for name, value in state.items()}
    return state | {"losses": torch.stack(losses), "norms": torch.stack(norms), "leaves": torch.stack(gradients)}


def same_bits(one: list[Result], other: list[Result]) -> bool:
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, other))


MARGIN = 8


def close(some: list[Result], plain: list[Result], exact: list[Result]) -> bool:
    """Is a run in FP32 as far from the one in FP64 as plain FP32 is?

    The bound is measured, on this processor and for this model: the distance of plain FP32 from FP64 is what the
    rounding of one order of summation does in three steps. An engine sums in another order, so it is another draw from
    the same roundings. The distance is a maximum over dozens of tensors of thousands of roundings each: MARGIN is for
    one draw above the other. That the model does not amplify rounding, so that the bound would hide a mistake, is
    asserted: 2e-6 is 16 units in the last place.
    """
    rounding = distance(plain, exact)
    assert rounding < 2e-6, f"ill-conditioned: plain FP32 is {rounding:.1e} from FP64"
    return distance(some, exact) <= MARGIN * rounding


def distance(some: list[Result], exact: list[Result]) -> float:
    """The largest ‖Δ‖/‖exact‖ over the ranks' losses, norms, gradients of leaves, and the state."""
    assert [rank.keys() for rank in some] == [rank.keys() for rank in exact]
    return max(
        float((a[name].double() - b[name].double()).norm() / b[name].double().norm().clamp(min=1e-30))
        for a, b in zip(some, exact)
        for name in b
    )
