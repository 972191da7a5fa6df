"""The lines that write a plan down, with this package and with PyTorch's own. A person puts them at the right place."""

from collections.abc import Iterator

from torch import nn

from minizero.engines.units import repeated_blocks
from minizero.xray.plan import Plan


def with_minizero(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines with this package."""
    if plan.recompute:
        yield "from minizero.recompute import Checkpointed"
        for blocks in lists_of_blocks(model):
            yield f"for name, block in list({blocks}.named_children()):"
            yield f"    setattr({blocks}, name, Checkpointed(block))"
    if plan.stage is not None or plan.dtype is not None:
        engine = ("DDP", "Zero1", "Zero2", "Zero3")[plan.stage or 0]
        options = [f"dtype={plan.dtype}"] if plan.dtype else []
        options += [f"sharding_factor={plan.sharding_factor}"] if plan.sharding_factor else []
        options += ["offload=True"] if plan.offload else []
        yield f"from minizero import Comm, {engine}"
        yield f"model = {engine}({', '.join(['model', 'Comm.from_process_group()', *options])})"
        yield "# then the optimizer, from model.parameters()"
    if plan.no_scores:
        yield "# in your attention: flash.flash_attention(q, k, v, causal=True)"
    if plan.loss_in_chunks:
        yield "# in your model: minizero.chunked_loss.cross_entropy_in_chunks(hidden, head.weight, targets, chunk=1024)"
    if plan.micro_batches > 1:
        yield f"# in your loop: loss = minizero.accumulate.accumulate(model, {plan.micro_batches} micro-batches)"


def with_pytorch(plan: Plan, model: nn.Module) -> Iterator[str]:
    """The lines with PyTorch's own. `fully_shard` that does not reshard is between ZeRO-2 and ZeRO-3."""
    if plan.recompute:
        yield "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"
        for blocks in lists_of_blocks(model):
            yield f"for name, block in list({blocks}.named_children()):"
            yield f"    setattr({blocks}, name, checkpoint_wrapper(block))"
    if plan.stage in (0, 1):
        yield "model = torch.nn.parallel.DistributedDataParallel(model)"
        if plan.stage == 1:
            yield "from torch.distributed.optim import ZeroRedundancyOptimizer"
            yield "# the optimizer: ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)"
    if plan.stage in (2, 3):
        names = ["CPUOffloadPolicy"] * plan.offload + ["MixedPrecisionPolicy"] * bool(plan.dtype) + ["fully_shard"]
        yield f"from torch.distributed.fsdp import {', '.join(names)}"
        options = ["reshard_after_forward=False"] if plan.stage == 2 else []
        options += [f"mp_policy=MixedPrecisionPolicy({plan.dtype})"] if plan.dtype else []
        options += ["offload_policy=CPUOffloadPolicy()"] if plan.offload else []
        for blocks in lists_of_blocks(model):
            yield f"for block in {blocks}.children():"
            yield f"    fully_shard({', '.join(['block', *options])})"
        yield f"fully_shard({', '.join(['model', *options])})"
        yield "# then the optimizer, from model.parameters()"
    elif plan.dtype:
        yield f"# around the forward: with torch.autocast(device, {plan.dtype})"
    if plan.no_scores:
        yield "# in your attention: F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    if plan.loss_in_chunks:
        yield "# in your model: F.linear_cross_entropy(hidden, head.weight, targets), since PyTorch 2.13"
    if plan.micro_batches > 1:
        yield f"# in your loop: (loss / {plan.micro_batches}).backward() for each of {plan.micro_batches} micro-batches"


def lists_of_blocks(model: nn.Module) -> list[str]:
    """What holds the repeated blocks, such as "model.layers"."""
    parents = dict.fromkeys(path.rpartition(".")[0] for path, _ in repeated_blocks(model))
    return [f"model.{parent}" if parent else "model" for parent in parents]
