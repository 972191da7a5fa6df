"""This process joins the others that torchrun has started, and leaves them again.

The processes meet by a store, whose address torchrun gives them. There each finds the others'
addresses; from then on their messages need no store (transport.py).
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from minizero.ranks.errors import RankFailed
from minizero.ranks.processes.transport import ProcessTransport
from minizero.ranks.processes.watch import Watch

TIMEOUT = timedelta(seconds=60)


@contextlib.contextmanager
def process_transport(group: Any = None) -> Iterator[ProcessTransport]:
    """This process's connections to the others: see `Comm.from_process_group`."""
    ours = None if dist.is_initialized() else _init_process_group()
    try:
        transport = _connect(group)
        try:
            yield transport
        except BaseException as error:
            transport.watch.blame(error.rank if isinstance(error, RankFailed) else transport.world_rank)
            transport.watch.close()  # the others are not to wait until this process ends
            raise
        finally:
            transport.watch.stop()
    finally:
        if ours is not None and ours is dist.group.WORLD:
            dist.destroy_process_group()


@functools.cache  # for all groups: a new store at the same address could be met while the old one ends
def _meet() -> tuple[dist.Store, int, int]:
    """The store, this rank, and the number of ranks."""
    return next(rendezvous("env://", timeout=TIMEOUT))


def is_a_rank() -> bool:
    """Whether a launcher, torchrun or another, has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _init_process_group() -> Any:
    """The group of all processes of this torchrun."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"from_process_group: {', '.join(missing)} not set: start with torchrun, or use World(n).run")
    # torchrun keeps one store for all its attempts. A rank would find an earlier group's addresses there.
    store, rank, size = _meet()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    number = store.add(f"groups of rank {rank}, attempt {attempt}", 1)
    store = dist.PrefixStore(f"attempt {attempt}, group {number}", store)
    gpus = _a_card_for_each(store, rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return dist.group.WORLD


def _a_card_for_each(store: dist.Store, rank: int, size: int, local_rank: int) -> bool:
    """Whether no two ranks have one card: NCCL refuses these, and they are the thread world's job. Each takes its card.

    A launcher may show all of a machine's cards to each of its ranks, as torchrun does, or to each its own alone, as
    Slurm's --gpus-per-task=1 does. Which it was, the cards' own names tell.
    """
    count = torch.cuda.device_count()
    index = local_rank % max(count, 1)
    store.set(f"card {rank}", str(torch.cuda.get_device_properties(index).uuid) if count else "")
    cards = [store.get(f"card {other}").decode() for other in range(size)]
    if all(cards) and len(set(cards)) == size:
        torch.cuda.set_device(index)
        return True
    if any(cards) and rank == 0:
        warnings.warn(
            f"from_process_group: {size} ranks see {len(set(cards) - {''})} GPUs, and each needs one of its own: they "
            "run on the CPU. Start as many ranks as there are GPUs, or World(n).run, whose threads may share one",
            stacklevel=2,
        )
    return False


def _connect(group: Any) -> ProcessTransport:
    if dist.get_rank(group) < 0:
        raise ValueError("from_process_group: this process is not in the group")
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    # gloo gets connections of our own, since a mismatch closes them. It carries CPU tensors, and agreements about
    # GPU tensors.
    store = group.get_group_store()
    number = store.add(f"communicators of rank {dist.get_rank()}", 1)  # an earlier one's addresses are old
    store, rank = dist.PrefixStore(f"communicator {number}", store), ranks.index(dist.get_rank())
    gloo = dist.ProcessGroupGloo(store, rank, len(ranks), TIMEOUT)
    # All wait for the last one. A rank that left at once would close connections that others still wait for.
    if store.add("connected", 1) == len(ranks):
        store.set("all connected", "")
    store.wait(["all connected"], TIMEOUT)
    nccl = group if device.type == "cuda" else None
    return ProcessTransport(rank, ranks, device, TIMEOUT.total_seconds(), "", nccl, Watch(gloo, store, ranks))
