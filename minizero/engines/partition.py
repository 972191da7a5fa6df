"""Flat buffers: a unit's parameters end to end, padded, and cut into N equal chunks, one a rank.

    |  weight  | bias |    weight    | bias |pad|      one unit (say, a transformer block)
    |   rank 0   |   rank 1   |  rank 2  |  rank 3  |  its N chunks; rank r owns chunk r

The module's own parameters become views of the flat buffer (the replica), so that one
collective moves a whole unit, and cuts may fall inside a parameter.
Rajbhandari et al., 2019, "ZeRO", section 5; Zhao et al., 2023, "PyTorch FSDP", section 3.2.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from minizero.memory import tag
from minizero.ranks.collectives import broadcast
from minizero.ranks.comm import Comm
from precision.master import gradient_to_master

GroupBy = Callable[[str, nn.Parameter], Any]


def pad(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """`tensor` with zeros appended along dimension 0 until `multiple` divides it."""
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


class Unit:
    """Parameters that are gathered, reduced and freed together. All flat buffers have `size` elements.

    flat: the replica in the computing dtype, which the module's parameters are views of.
    master: FP32, what the optimizer's parameters are cut from: this rank's chunk, or all of it (DDP). That of a frozen
        unit, which no optimizer steps, has the computing dtype.
    shards: the optimizer's parameters, a piece of `master` for each value of `group_by` in it.
    """

    flat: torch.Tensor
    master: torch.Tensor

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        named: dict[str, nn.Parameter],
        everyone: Comm,
        inside: Comm,
        dtype: torch.dtype,
        group_by: GroupBy | None,
    ) -> None:
        self.name, self.module, self.dtype = name, module, dtype
        self.everyone, self.comm = everyone, inside  # all ranks, and those that the unit is sharded over
        self.names, self.parameters = list(named), list(named.values())
        self.trains = self.parameters[0].requires_grad  # a unit is trained or frozen, never both
        self.shapes = [p.shape for p in self.parameters]
        self.offsets = [sum(s.numel() for s in self.shapes[:i]) for i in range(len(self.shapes))]
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.numel = sum(s.numel() for s in self.shapes)
        self.size = -(-self.numel // everyone.size) * everyone.size
        self.group_of = [group_by(n, p) if group_by else None for n, p in named.items()]
        self.shards: list[nn.Parameter] = []
        self.groups: list[Any] = []  # the value of `group_by` for each shard
        self.gradient: torch.Tensor | None = None  # full and local, while backward fills it
        self.unwritten: list[torch.Tensor | None] = []  # places in `gradient` that hold nothing yet
        self.earlier: list[torch.Tensor | None] = []  # the shards' gradients from before this backward
        self.inputs: dict[int, int] = {}  # of the last forward, with a gradient: id and version
        self.began = 0  # the last forward: autograd's number for the next operation of this thread
        self.users = 0  # of the replica in backward: a unit can be used several times
        self.shown = -1  # version of `gradient` when .grad became a view of it
        self.version = -1  # of `master` when the replica was last made from it

    def flatten(self, values: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Rank 0's values (by default the parameters') in one flat FP32 buffer on this rank's device."""
        full = torch.zeros(self.size, dtype=torch.float32, device=self.comm.device)
        for view, value in zip(self.views(full), values or self.parameters, strict=True):
            view.copy_(value.detach())
        # Units of one size can still be cut differently; the ranks agree on how.
        layout = ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(self.names, self.shapes, strict=True))
        full = broadcast(full, self.everyone, label=f"{self.name} of {layout}")
        tag(full, "parameters")
        return full

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat buffer, in their own shapes."""
        pieces = flat[: self.numel].split([s.numel() for s in self.shapes])
        return [piece.view(s) for piece, s in zip(pieces, self.shapes, strict=True)]

    def chunk(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of a flat buffer, as a view."""
        return flat.chunk(self.comm.size)[self.comm.rank]

    def point_parameters_at(self, flat: torch.Tensor | None) -> None:
        """Make the module's parameters views of `flat`; with None, empty, so that using one is an error."""
        empty = torch.empty(0, 0, dtype=self.dtype, device=self.comm.device)
        for parameter, view in zip(
            self.parameters, self.views(flat) if flat is not None else [empty] * len(self.shapes), strict=True
        ):
            parameter.data = view

    def cut_shards(self) -> None:
        """Cut `master` into the optimizer's parameters: where the value of `group_by` changes, and nowhere else.

        A value that this rank holds nothing of has an empty shard. So every rank has something of each, and what
        writes it on all ranks (an optimizer's step, a loop under no_grad) is seen by all: see `replica_is_stale`.
        """
        tag(self.master, "parameters" if self.dtype == self.master.dtype else "optimizer")
        start = 0 if self.whole else self.comm.rank * self.master.numel()
        ends = [*self.offsets[1:], self.size]  # the padding goes with the last parameter
        for group, low, high in zip(self.group_of, self.offsets, ends, strict=True):
            low, high = max(low - start, 0), min(high - start, self.master.numel())
            if low >= high:
                continue
            if self.groups and self.groups[-1] == group:
                low = int(self.shards.pop().storage_offset() - self.master.storage_offset())
                self.groups.pop()
            self.groups.append(group)
            self.shards.append(nn.Parameter(self.master[low:high], requires_grad=self.trains))
        for group in dict.fromkeys(self.group_of):
            if group not in self.groups:
                self.groups.append(group)
                self.shards.append(nn.Parameter(self.master[:0], requires_grad=self.trains))

    def replica_is_stale(self) -> bool:
        """Has `master` been written since the replica was made from it?

        If so, all ranks communicate. So all must give one answer: whatever writes some rank's chunk marks them all.
        """
        return self.master._version != self.version

    def replica_is_fresh_now(self) -> None:
        """Remember what `master` the replica was made from."""
        self.version = self.master._version

    @property
    def whole(self) -> bool:
        """Does this rank's optimizer hold the whole unit (DDP), or a chunk of it?"""
        return self.master.numel() == self.size

    def begin_gradient(self) -> None:
        """A backward begins. Set aside what the shards' .grad holds:

        an average from before this backward   `earlier`, to be added at the end
        a view of the local sum, under no_sync  nothing: backward goes on adding to `gradient`
        None, after zero_grad()                 drops the local sum too
        """
        gradients = [shard.grad for shard in self.shards]
        if all(gradient is None for gradient in gradients):
            self.gradient, self.earlier = None, []
        if self.gradient is None:
            self.earlier = gradients
        elif self.gradient._version != self.shown and not self.whole:
            raise RuntimeError(
                f"{self.name}: .grad was written to between backwards under no_sync, and shows this rank's chunk "
                "only: use zero_grad(set_to_none=True), and clip or scale after the last of them"
            )
        # Where they stay in sight, zero_grad() still works on them should this backward break off.
        if self.gradient is not None or self.shards is self.parameters:
            for shard in self.shards:
                shard.grad = None

    def restore_gradient(self) -> None:
        """A backward broke off: the shards have what they had before it, unless zero_grad() has taken it since."""
        self.gradient = None
        if self.shards is self.parameters:  # whose .grad had to make room for autograd's
            for shard, earlier in zip(self.shards, self.earlier):
                if shard.grad is None:
                    shard.grad = earlier
        self.earlier = []

    def deposit(self, parameter: nn.Parameter, gradient: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Put a parameter's gradient into its place in the unit's full gradient, or add it to what is there."""
        if gradient is None or gradient.is_sparse:
            raise RuntimeError(f"{self.name}: sparse gradients are not supported: use sparse=False")
        if self.gradient is None:
            self.gradient = torch.empty(self.size, dtype=dtype, device=self.comm.device)
            tag(self.gradient, "gradients")
            self.unwritten = [*self.views(self.gradient), self.gradient[self.numel :]]  # the last is the padding
        index = self.index[id(parameter)]
        place = self.unwritten[index]
        if place is None:
            self.views(self.gradient)[index].add_(gradient)
        else:
            place.copy_(gradient)
            self.unwritten[index] = None

    def missing(self) -> int:
        """How many elements of the full gradient this backward still owes."""
        return sum(place.numel() for place in self.unwritten if place is not None)

    def zero_unwritten(self) -> None:
        """The gradient of a parameter that was not used is zero."""
        for place in self.unwritten:
            if place is not None:
                place.zero_()
        self.unwritten = [None] * len(self.unwritten)

    def take_gradient(self) -> torch.Tensor:
        """The full local gradient, which from now on is the caller's alone."""
        if self.gradient is None:  # unused on this rank, but perhaps not on others
            self.gradient = torch.zeros(self.size, dtype=self.dtype, device=self.comm.device)
        else:
            self.zero_unwritten()
        gradient, self.gradient, self.unwritten = self.gradient.to(self.dtype), None, []
        tag(gradient, "gradients")
        return gradient

    def set_gradient(self, gradient: torch.Tensor, full: torch.Tensor | None = None) -> None:
        """Give the shards their gradient, as long as `master`, plus what they had before this backward.

        `full` is kept as long as the shards' gradients live, which is until zero_grad().
        """
        gradient = gradient_to_master(gradient)
        tag(gradient, "gradients")
        pieces = self._pieces(gradient)
        for shard, piece, earlier in zip(self.shards, pieces, self.earlier or [None] * len(pieces), strict=True):
            shard.grad = piece if earlier is None else piece.add_(earlier)
            shard.grad.full = full  # type: ignore[attr-defined]
        self.earlier = []

    def show_gradient(self) -> None:
        """Under no_sync: let the shards' gradients be views of the full local one."""
        assert self.gradient is not None
        self.zero_unwritten()
        pieces = self._pieces(self.gradient if self.whole else self.chunk(self.gradient))
        for shard, piece in zip(self.shards, pieces, strict=True):
            shard.grad = piece.to(shard.device)
        self.shown = self.gradient._version

    def gradient_norms(self, norm_type: float) -> torch.Tensor:
        """The norm of each N-th of the gradient, for N ranks, that this rank holds."""
        gradients = [torch.zeros_like(s) if s.grad is None else s.grad for s in self.shards]
        flat = pad(torch.cat([gradient.view(-1) for gradient in gradients]), self.master.numel())
        return torch.stack(
            [torch.linalg.vector_norm(c, norm_type) for c in flat.split(self.size // self.everyone.size)]
        )

    def shard_names(self, prefix: str) -> list[str]:
        """A name for each shard: the parameter's own (FP32 DDP), or the unit's with the group's."""
        if self.shards is self.parameters:
            return [prefix + name for name in self.names]
        return [f"{prefix}{self.name}" + ("" if group is None else f".{group}") for group in self.groups]

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [shard.numel() for shard in self.shards]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(shard.shape) for piece, shard in zip(pieces, self.shards, strict=True)]


def make_units(
    module: nn.Module,
    comm: Comm,
    inside: Comm,
    dtype: torch.dtype,
    given: Sequence[nn.Module] | None,
    group_by: GroupBy | None,
) -> list[Unit]:
    """The root unit first, then the others in the module's order.

    Parameters that are frozen, and those of norms that compute in FP32 while the rest does not, form units of their
    own.

    given: modules, each to be a unit; by default the repeated blocks. A parameter belongs to the
    innermost unit around it; one that is tied across units belongs to the root.
    """
    given = None if given is None else list(given)
    paths = {id(m): path for path, m in module.named_modules()}
    if given is not None and any(id(m) not in paths for m in given):
        raise ValueError("units: each must be a submodule of the wrapped module")
    chosen = dict(repeated_blocks(module)) if given is None else {paths[id(m)]: m for m in given}
    norms = {path for path, part in module.named_modules(remove_duplicate=False) if keeps_statistics(part)}
    owners: dict[int, set[str]] = {}
    in_norms: dict[int, bool] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = [path for path in chosen if path and name.startswith(path + ".")]
        owners.setdefault(id(parameter), set()).add(max(around, key=len, default=""))
        in_norms[id(parameter)] = name.rpartition(".")[0] in norms and in_norms.get(id(parameter), True)
    contents: dict[tuple[str, bool, torch.dtype], dict[str, nn.Parameter]] = {}
    for path in ["", *chosen]:
        for name, parameter in module.named_parameters():
            owner = owners[id(parameter)]
            if (owner.copy().pop() if len(owner) == 1 else "") == path:
                its = torch.float32 if in_norms[id(parameter)] else dtype
                contents.setdefault((path, parameter.requires_grad, its), {})[name] = parameter
    return [
        Unit(
            (path or "root") + ("" if its == dtype else " (norms)") + ("" if trains else " (frozen)"),
            chosen.get(path) if path else None,
            named,
            comm,
            inside,
            its,
            group_by,
        )
        for (path, trains, its), named in contents.items()
    ]


def keeps_statistics(module: nn.Module) -> bool:
    """Does it keep running statistics, as batch norms do? They are FP32 buffers, and need FP32 inputs and weights."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    its_own = isinstance(module, nn.modules.batchnorm._NormBase) or not [*module.children()]  # not its parts'
    return its_own and any(name.startswith("running_") for name in names)


def repeated_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of each ModuleList or Sequential whose children are of one type: (path, child)."""
    children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
    kinds = {type(child) for _, child in children}
    repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) == 1
    if repeated and not kinds & {nn.ModuleList, nn.ModuleDict}:  # which are never called themselves
        yield from children
    else:
        for child_path, child in children:
            yield from repeated_blocks(child, child_path)
