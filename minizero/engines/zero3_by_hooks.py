"""Stage 3 without a list of layers: four hooks take the place of the loop of `zero3_on_a_page.py`. Read this second.

    forward     a unit's module begins                 gather
                it ends                                release
    backward    the gradient of its output has come    gather
                its last parameter has its gradient    release, reduce

A unit is a block of the model. What lies outside the blocks is one more, the root: it stays whole from the model's
forward to the end of its backward. The training loop is PyTorch's, with any elementwise optimizer over the shards.
`core.py` comes next: two more moments, all four stages, units that return tuples and share parameters.

    shards = shard(model, model.blocks, comm)      # on each rank
    optimizer = torch.optim.AdamW(shards)          # and the loop of any model follows

Zhao et al., 2023, "PyTorch FSDP", section 4.3.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from minizero.engines.layout import pad
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.comm import Comm


class Unit:
    """Parameters that come and go together. They are views of `replica`, which has memory only while they are used."""

    def __init__(self, name: str, parameters: list[nn.Parameter], comm: Comm) -> None:
        self.name, self.parameters, self.comm = name, parameters, comm
        self.replica = pad(parameters_to_vector(parameters).detach(), comm.size)
        self.shard = nn.Parameter(self.replica.chunk(comm.size)[comm.rank].clone())  # what the optimizer updates
        vector_to_parameters(self.replica, parameters)
        self.release()

    @torch.no_grad()
    def gather(self) -> None:
        """Every rank's shard into every rank's `replica`, unless it is whole already.

        PyTorch counts the writes to a tensor. If autograd has saved it, and there are new ones, backward raises. Here
        that would be a false alarm: the same numbers come back. No alarm comes, since a parameter set by `.data =`,
        as by vector_to_parameters, has a count of its own: writes to `replica` are not in it.
        """
        memory = self.replica.untyped_storage()
        if not memory.nbytes():
            memory.resize_(self.replica.nbytes)
            all_gather(self.shard, self.comm, out=self.replica, label=self.name)

    def release(self) -> None:
        """Free the memory. The tensors stay, empty, also those that autograd saved; the next `gather` fills them."""
        self.replica.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """The shard gets its part of the mean gradient. The full gradient goes."""
        gradient = parameters_to_vector([p.grad for p in self.parameters])  # type: ignore[misc]  # all have come
        for parameter in self.parameters:
            parameter.grad = None
        mean = reduce_scatter(pad(gradient, self.comm.size), self.comm, "mean", label=self.name)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


def watch(unit: Unit, module: nn.Module, stays: bool) -> None:
    """Put the hooks on the unit's module and parameters. stays: the unit is whole from its forward to its backward."""
    came: list[nn.Parameter] = []  # whose gradient this backward has brought

    # 1. The module begins.
    def forward_begins(*_: Any) -> None:
        if came:  # the last backward has left out a parameter: see 4
            raise RuntimeError(
                f"{unit.name}: only {len(came)} of its parameters got a gradient in backward: use Zero3 (or it raised)"
            )
        unit.release()  # if no backward came, a root is still whole (see 2); after a step it is old
        unit.gather()

    # 2. It ends. Other units compute before this one is needed again. The root stays, if a backward can follow.
    def forward_ends(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(output_has_gradient)
        if not (stays and output.requires_grad):
            unit.release()

    # 3. Backward goes through the module from its end to its beginning.
    def output_has_gradient(_: torch.Tensor) -> None:
        unit.gather()

    # 4. A gradient is complete when all uses of its parameter went backward. When all are, nothing needs the unit any
    # more: Linear's backward gives the gradients of its weight and of its input at once. (Not served: a use of
    # `w.detach()` brings w no gradient, and its backward may read w later, when it is released.)
    def parameter_has_gradient(parameter: nn.Parameter) -> None:
        came.append(parameter)
        if len(came) == len(unit.parameters):
            came.clear()
            unit.release()
            unit.reduce()

    module.register_forward_pre_hook(forward_begins)
    module.register_forward_hook(forward_ends)
    for parameter in unit.parameters:
        parameter.register_post_accumulate_grad_hook(parameter_has_gradient)


def shard(model: nn.Module, blocks: Iterable[nn.Module], comm: Comm) -> list[nn.Parameter]:
    """This rank's 1/N of each unit, for the optimizer. The model itself forgets its parameters; hooks bring them back.

    model: the same on all ranks. blocks: modules of it, each to be a unit.
    """
    units = [(block, list(block.parameters())) for block in blocks]
    inside = {part for block, _ in units for part in block.modules()}
    outside = [p for part in model.modules() if part not in inside for p in part.parameters(recurse=False)]
    units.insert(0, (model, list(dict.fromkeys(outside))))
    if sum(len(its) for _, its in units) > len(list(model.parameters())):
        raise ValueError("shard: two blocks share a parameter: use Zero3 (or a block and the rest do)")
    names = {module: name or "root" for name, module in model.named_modules()}
    shards = []
    for module, its in units:
        if its:
            unit = Unit(names[module], its, comm)
            watch(unit, module, stays=module is model)
            shards.append(unit.shard)
    return shards


# Read core.py next. It reduces at the last gradient, too. It releases a unit later, when backward leaves it: so it
# serves `w.detach()`. The folder any_model serves what neither does: parameters without a gradient, frozen ones, units
# that return anything, sums under no_sync, 16 bits, saving.
