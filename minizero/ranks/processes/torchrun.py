"""This process joins the others that torchrun has started, and leaves them again.

The processes meet by a store, whose address torchrun gives them. There each finds the others'
addresses; from then on their messages need no store (transport.py).
"""

import contextlib
import functools
import os
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


def _init_process_group() -> Any:
    """The group of all processes of this torchrun."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"from_process_group: {', '.join(missing)} not set: start with torchrun, or use World(n).run")
    # Two ranks on one GPU are the thread world's job: NCCL refuses them.
    gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    # torchrun keeps one store for all its attempts. A rank would find an earlier group's addresses there.
    store, rank, size = _meet()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    number = store.add(f"groups of rank {rank}, attempt {attempt}", 1)
    store = dist.PrefixStore(f"attempt {attempt}, group {number}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return dist.group.WORLD


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
