"""Our collectives, engines and ledger beside PyTorch's, in the same processes.

Everything is timed interleaved, processes in an order that is shuffled each round, threads with and without a
ledger in turn. The best of many counts, since other work on the machine only ever slows a run down; processes are
launched several times, since some launches are luckier than others from their first message to their last. Ratios
are ours against theirs: above 1 we are faster.
"""

import argparse
import contextlib
import copy
import os
import random
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from minizero import DDP, GPT, Comm, GPTConfig, World, Zero3, barrier
from minizero.memory import Ledger
from minizero.ranks.collectives import all_gather, reduce_scatter

MIB = 2**20


def interleaved(calls, rounds):
    """The best time of each call in seconds, over `rounds` rounds of all of them; the slowest rank counts."""
    best = {name: float("inf") for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle  # the same on all ranks
    for _ in range(rounds):
        shuffle(order)  # what ran before leaves its data in the caches: not always the same
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            best[name] = min(best[name], seconds.item())
    return best


def collectives(comm, rounds):
    # torch 2.13 renamed the peers; 2.11 has only the old names.
    their_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    their_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rows = []
    for size in (1 * MIB, 4 * MIB, 16 * MIB):
        full = torch.randn(size // 4)
        out = torch.randn(size // 4)
        shard = out.chunk(comm.size)[comm.rank]  # in place, as the engines gather
        piece = torch.empty_like(shard)
        times = interleaved(
            {
                "gather": lambda: all_gather(shard, comm, out=out),  # noqa: B023
                "their gather": lambda: their_gather(out, shard),  # noqa: B023
                "scatter": lambda: reduce_scatter(full, comm),  # noqa: B023
                "their scatter": lambda: their_scatter(piece, full),  # noqa: B023
            },
            rounds,
        )
        for name, what in (("gather", "all-gather"), ("scatter", "reduce-scatter")):
            rows.append((f"{what}, {size // MIB} MiB", comm.size, times[name], times["their " + name]))
    return rows


def steps(comm, rounds):
    """One training step of the demo's model, ours and PyTorch's, and with the ledger on."""
    generator = torch.Generator().manual_seed(comm.rank)
    x, y = torch.randint(256, (2, 2, 64), generator=generator)
    plain = GPT(GPTConfig())
    sharded = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (comm.size,))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    models = {
        "DDP": DDP(copy.deepcopy(plain), comm),
        "their DDP": DistributedDataParallel(copy.deepcopy(plain)),
        "Zero3": Zero3(copy.deepcopy(plain), comm),
        "their Zero3": fully_shard(sharded, mesh=mesh),
    }
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()}

    def step(name):
        models[name](x, y).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def watched(name):
        with Ledger(models[name], optimizers[name]):
            step(name)

    calls = {name: lambda name=name: step(name) for name in models}
    calls |= {f"{name} + ledger": lambda name=name: watched(name) for name in ("DDP", "Zero3")}
    times = interleaved(calls, rounds)
    return [
        ("step: DDP / DistributedDataParallel", comm.size, times["DDP"], times["their DDP"]),
        ("step: Zero3 / fully_shard", comm.size, times["Zero3"], times["their Zero3"]),
        ("step: DDP with ledger / without", comm.size, times["DDP + ledger"], times["DDP"]),
        ("step: Zero3 with ledger / without", comm.size, times["Zero3 + ledger"], times["Zero3"]),
    ]


def taking_turns(comm, rounds):
    """DDP's and Zero3's step on ranks that are threads: without a ledger, and with one rank watched, as in the demo."""
    x, y = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(comm.rank))
    rows = []
    for engine in (DDP, Zero3):
        model = engine(GPT(GPTConfig()), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        best = {False: float("inf"), True: float("inf")}
        for turn in range(2 * rounds):
            watched, rank = turn % 2 == 1, turn // 2 % comm.size
            barrier(comm)
            start = time.perf_counter()
            with Ledger(model, optimizer) if watched and comm.rank == rank else contextlib.nullcontext():
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            barrier(comm)
            best[watched] = min(best[watched], time.perf_counter() - start)
        what = f"step: {engine.__name__} on threads, one of them watched / none"
        rows.append((what, comm.size, best[True], best[False]))
    return rows


def sizes(comm, rounds):
    """Zero3 beside fully_shard at three sizes: the time of a step, and the most that rank 0 holds in one."""
    mesh = init_device_mesh("cpu", (comm.size,))
    rows = []
    for width in (128, 256, 384):
        plain = GPT(GPTConfig(width=width))
        sharded = copy.deepcopy(plain)
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        models = {"ours": Zero3(plain, comm), "theirs": fully_shard(sharded, mesh=mesh)}
        optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
        x, y = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(comm.rank))

        def step(name):
            models[name](x, y).backward()  # noqa: B023
            optimizers[name].step()  # noqa: B023
            optimizers[name].zero_grad()  # noqa: B023

        times = interleaved({name: lambda name=name: step(name) for name in models}, rounds)
        peaks = {}
        for name, model in models.items():
            with Ledger(model, optimizers[name]) as ledger:
                step(name)
            peaks[name] = ledger.peak["total"]
        rows.append((f"step: Zero3 / fully_shard, width {width}", comm.size, times["ours"], times["theirs"]))
        rows.append((f"peak: Zero3 / fully_shard, width {width}, MiB", comm.size, peaks["ours"], peaks["theirs"]))
    return rows


def rank_main(rank, world_size, rendezvous, rounds, queue):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    with Comm.from_process_group() as comm:
        rows = collectives(comm, rounds) + steps(comm, rounds) + sizes(comm, rounds)
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def launch(context, world_size, rounds):
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, os.path.join(folder, "rendezvous"), rounds, queue)
        torch.multiprocessing.spawn(rank_main, arguments, nprocs=world_size)
    return queue.get()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="default: 60")
    parser.add_argument("--launches", type=int, default=3, help="of the processes (default: 3)")
    parser.add_argument("--world-size", type=int, nargs="*", default=[2, 4], help="default: 2 4")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    context = torch.multiprocessing.get_context("spawn")
    table = Table(
        title=f"Best of {options.launches} × {options.rounds}, torch {torch.__version__}, gloo, {os.cpu_count()} cores"
    )
    for column in ("what", "ranks", "ours, ms", "theirs, ms", "theirs / ours"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for world_size in options.world_size:
        launches = [launch(context, world_size, options.rounds) for _ in range(options.launches)]
        rows = []
        for same in zip(*launches):  # one row, of each launch
            what, ranks, ours, theirs = zip(*same)
            rows.append((what[0], ranks[0], min(ours), min(theirs)))
        rows += World(world_size, device="cpu").run(taking_turns, options.rounds)[0]
        for what, ranks, ours, theirs in rows:
            unit = 1 / MIB if what.startswith("peak") else 1e3
            table.add_row(what, str(ranks), f"{ours * unit:.2f}", f"{theirs * unit:.2f}", f"{theirs / ours:.2f}")
    Console().print(table)
