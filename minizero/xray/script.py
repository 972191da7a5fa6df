"""The lines that write a plan down, with this package and with PyTorch's own. A person puts them at the right place."""

from collections.abc import Iterator

from torch import nn

from minizero.engines import STAGES
from minizero.engines.any_model.units import repeated_blocks
from minizero.xray.plan import Plan
from minizero.xray.techniques import fields_of


def with_minizero(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines with this package."""
    if plan.recompute:
        yield from around_blocks("minizero.recompute", "Checkpointed", model)
    if plan.stage is not None or plan.dtype:
        engine = STAGES[plan.stage or 0].__name__
        names = ("sharding_factor", "reshard_after_forward", "offload", "dtype")
        options = [f"{name}={getattr(plan, name)}" for name in fields_of(plan) if name in names]
        yield f"from minizero import Comm, {engine}"
        yield f"model = {engine}({', '.join(['model', 'Comm.from_process_group()', *options])})"
        yield "# then the optimizer, from model.parameters()"
    if plan.flash:
        yield "# in your attention: flash.flash_attention(q, k, v, causal=True), with its dropout_p="
    if plan.chunked_loss:
        yield "# in your model: minizero.chunked_loss.cross_entropy_in_chunks(hidden, head.weight, targets, chunk=1024)"
    if (n := plan.micro_batches) > 1:
        yield "from minizero.accumulate import accumulate"
        yield f"# in your loop, or with a list of {n} dicts: loss = accumulate(model, zip(x.chunk({n}), y.chunk({n})))"


def with_pytorch(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines with PyTorch's own, for a plan that `fit` can find: on one device, or of stage 2 or 3."""
    if plan.recompute:
        wrapper = "checkpoint_wrapper"
        yield from around_blocks(f"torch.distributed.algorithms._checkpoint.{wrapper}", wrapper, model)
    if plan.stage is not None:
        options = ["reshard_after_forward=False"] * (plan.stage == 2 or not plan.reshard_after_forward)
        options += [f"mp_policy=fsdp.MixedPrecisionPolicy({plan.dtype})"] if plan.dtype else []
        options += ["offload_policy=fsdp.CPUOffloadPolicy()"] if plan.offload else []
        if plan.stage == 2:
            yield "# The nearest to ZeRO-2. Parameters are sharded from backward to the next forward, which costs"
            yield "# a shard more. Its peak was not run here; ours: Zero3(…, reshard_after_forward=False)"
        yield "from torch.distributed import fsdp"
        for blocks in lists_of_blocks(model):
            yield f"for block in {blocks}.children():"
            yield f"    fsdp.fully_shard({', '.join(['block', *options])})"
        yield f"fsdp.fully_shard({', '.join(['model', *options])})"
        yield "# then the optimizer, from model.parameters()"
    elif plan.dtype:
        yield f"# around the forward: with torch.autocast(device, {plan.dtype}); its peak was not run here"
    if plan.flash:
        yield "# in your attention: F.scaled_dot_product_attention(q, k, v, is_causal=True), with its dropout_p="
    if plan.chunked_loss:
        yield "# in your model: F.linear_cross_entropy(hidden, head.weight, targets), since PyTorch 2.13"
    if (n := plan.micro_batches) > 1:
        yield f"# in your loop: for number, (x1, y1) in enumerate(zip(x.chunk({n}), y.chunk({n})), 1):"
        if plan.stage is not None:
            yield f"#     model.set_requires_gradient_sync(number == {n})"
        yield f"#     (model(x1, y1) / {n}).backward()"


def around_blocks(module: str, wrapper: str, model: nn.Module) -> Iterator[str]:
    """The lines that put a wrapper of some module around each repeated block."""
    yield f"from {module} import {wrapper}"
    for blocks in lists_of_blocks(model):
        yield f"for name, block in list({blocks}.named_children()):"
        yield f"    setattr({blocks}, name, {wrapper}(block))"


def lists_of_blocks(model: nn.Module) -> list[str]:
    """What holds the repeated blocks, such as "model.layers"."""
    return list(dict.fromkeys(f"model.{path}".rpartition(".")[0] for path, _ in repeated_blocks(model)))
