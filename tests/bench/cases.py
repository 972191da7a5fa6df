"""What `python -m tests.bench` measures. A benchmark yields (size, {contender: {measure: number}}), ours first."""

import copy
import math
import random
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as their_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flash import attention_tiled, flash_attention
from minizero import DDP, GPT, GPTConfig, Zero3, all_reduce, barrier
from minizero.memory import Ledger
from minizero.memory.operators import Watcher
from minizero.models.gpt import RECOMPUTE
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.recompute import by_function, by_hooks, checkpoint, checkpoint_selective, keep_matmuls
from precision import BF16, FP16
from tests.support.profiled import profiled

MIB = 2**20


def measured(calls, limit, peak=None, comm=None):
    """{contender: milliseconds, and MiB if `peak` says its bytes}: the best of all rounds in `limit` seconds.

    calls: {contender: function}. They take turns, in another order each round: what ran before leaves its data in the
    caches. In one process the time is the processor's; of ranks it is the clock's, and the slowest counts.
    """
    best, order, shuffle = dict.fromkeys(calls, math.inf), list(calls), random.Random(0).shuffle  # same on all ranks
    clock = time.perf_counter if comm else time.process_time
    spent, rounds = 0.0, 0
    while spent < limit or rounds < 3:
        shuffle(order)
        for name in order:
            if comm:
                barrier(comm)
            start = clock()
            calls[name]()
            seconds = clock() - start
            if comm:
                seconds = all_reduce(torch.tensor(seconds), comm, "max").item()
            best[name], spent = min(best[name], seconds), spent + seconds
        rounds += 1
    found = {name: {"ms": 1e3 * seconds} for name, seconds in best.items()}
    return {name: each | ({"MiB": peak(name) / MIB} if peak else {}) for name, each in found.items()}


def training(model, optimizer, *batch):
    """A step as a function without arguments. It leaves no gradients."""

    def step():
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# Ranks that are processes. comm: their communicator, beside PyTorch's default group of the same processes.


def of_ranks(comm, what, limit):
    """The rows of one benchmark, on one of its ranks."""
    return list(globals()[what](limit, comm))


def collectives(limit, comm):
    """All-gather and reduce-scatter."""
    # torch 2.13 renamed the peers; 2.11 has only the old names.
    their_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    their_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for size in (1, 4, 16):
        full, out = torch.randn(2, size * MIB // 4)
        shard = out.chunk(comm.size)[comm.rank]  # in place, as the engines gather
        gathers = {"ours": partial(all_gather, shard, comm, out=out), "PyTorch": partial(their_gather, out, shard)}
        yield f"all-gather, {size} MiB", measured(gathers, limit, comm=comm)
        piece = torch.empty_like(shard)
        scatters = {"ours": partial(reduce_scatter, full, comm), "PyTorch": partial(their_scatter, piece, full)}
        yield f"reduce-scatter, {size} MiB", measured(scatters, limit, comm=comm)


def engines(limit, comm):
    """A training step of a GPT, and the most that a rank holds in it."""
    mesh = init_device_mesh("cpu", (comm.size,))
    x, y = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(comm.rank))
    for width in (128, 256, 384):
        plain = GPT(GPTConfig(width=width))
        theirs = copy.deepcopy(plain)
        for block in theirs.blocks:
            fully_shard(block, mesh=mesh)
        for models in (
            {"DDP": DDP(copy.deepcopy(plain), comm), "PyTorch": DistributedDataParallel(copy.deepcopy(plain))},
            {"Zero3": Zero3(plain, comm), "fully_shard": fully_shard(theirs, mesh=mesh)},
        ):
            models = {name: (model, torch.optim.AdamW(model.parameters())) for name, model in models.items()}
            steps = {name: training(*pair, x, y) for name, pair in models.items()}

            def peak(name, models=models, steps=steps):
                with Ledger(*models[name]) as ledger:
                    steps[name]()
                return ledger.peak["total"]

            yield f"{'/'.join(models)}, width {width}", measured(steps, limit, peak, comm)


# One process.


class Nothing(Watcher):
    """Lets every operator come by: what PyTorch takes to show them to Python. No watcher of this kind is below it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


def ledger(limit):
    """What it costs to watch a step. A watcher is opened for every step, as in the demo."""

    def under(watcher, model, optimizer, step):
        with watcher(model, optimizer):
            step()

    def tracker(model, optimizer):
        watcher = MemTracker()
        watcher.track_external(model, optimizer)
        return watcher

    watchers = {"nothing": lambda *_: Nothing(), "Ledger": Ledger, "MemTracker": tracker}
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    steps = {"an MLP": (lambda x: mlp(x).square().mean(), mlp, [torch.randn(32, 64)])}
    for batch, width in ((2, 32), (2, 128), (16, 128)):
        model = GPT(GPTConfig(width=width))
        steps[f"a GPT of width {width}, batch {batch}"] = model, model, torch.randint(256, (2, batch, 64))
    for size, (loss, model, batch) in steps.items():
        optimizer = torch.optim.AdamW(model.parameters())
        step = training(loss, optimizer, *batch)
        calls = {name: partial(under, watcher, model, optimizer, step) for name, watcher in watchers.items()}
        yield size, measured({"nobody": step} | calls, limit)


def recompute(limit):
    """Checkpoints: forward and backward, and the peak above the start."""
    products = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")]
    same = partial(create_selective_checkpoint_contexts, products)
    full = {"checkpoint": checkpoint, "by_function": by_function, "by_hooks": by_hooks}
    full |= {f"PyTorch, use_reentrant={x}": partial(their_checkpoint, use_reentrant=x) for x in (True, False)}
    full |= {"none": lambda fn, *arguments: fn(*arguments)}
    kept = {"checkpoint_selective": partial(checkpoint_selective, keep_matmuls)}
    kept |= {"PyTorch": partial(their_checkpoint, use_reentrant=False, context_fn=same)}
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(16))
    batch, tokens = torch.randn(512, 64, requires_grad=True), torch.randint(256, (2, 4, 64))
    model = GPT(GPTConfig(recompute="full"))

    def mlp(way):
        x = batch
        for block in blocks:
            x = x + way(block, x)
        x.square().mean().backward()
        blocks.zero_grad()
        batch.grad = None

    def gpt(way):
        RECOMPUTE["full"] = way
        model(*tokens).backward()
        model.zero_grad()

    for title, ways in (("whole", full), ("products kept", kept)):
        for name, step in {"MLP of 16 blocks": mlp, "GPT": gpt}.items():
            calls = {way: partial(step, function) for way, function in ways.items()}

            def peak(way, calls=calls):
                start, most = profiled(lambda: calls[way])
                return most - start

            yield f"{name}, {title}", measured(calls, limit, peak)
    RECOMPUTE["full"] = checkpoint


def attention(limit):
    """Forward and backward of 4 heads of 64 numbers, float32."""

    def plain(q, k, v, causal):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
        return scores.softmax(-1) @ v

    def both(way, *qkv):
        torch.autograd.grad(way(*qkv).sum(), qkv)

    for causal in (False, True):
        ways = {"tiled": partial(attention_tiled, causal=causal), "flash": partial(flash_attention, causal=causal)}
        ways |= {"plain": partial(plain, causal=causal)}
        ways |= {"PyTorch": partial(F.scaled_dot_product_attention, is_causal=causal)}
        for n in (512, 1024, 2048, 4096):
            qkv = [torch.randn(1, 4, n, 64, requires_grad=True) for _ in range(3)]
            calls = {name: partial(both, way, *qkv) for name, way in ways.items()}
            yield f"N = {n:,}{', causal' * causal}", measured(calls, limit)


def formats(limit, count=2**22):
    """Conversions of 2^22 numbers. "extremes": an eighth of them overflows, a quarter is subnormal."""
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    extremes, tensor, bits = x.copy(), torch.from_numpy(x), FP16.encode(x)
    extremes[::4] *= 1e-6
    extremes[1::8] *= 1e6
    for size, given in (("", x), (", extremes", extremes), (", from float64", x.astype(np.float64))):
        with np.errstate(over="ignore", under="ignore"):
            calls = {"FP16.encode": partial(FP16.encode, given), "NumPy": partial(given.astype, np.float16)}
            yield f"encode an array{size}", measured(calls | by_gfloat(given), limit)
    calls = {"FP16.decode": partial(FP16.decode, bits), "NumPy": partial(bits.view(np.float16).astype, np.float32)}
    yield "decode an array", measured(calls, limit)
    calls = {"FP16.encode": partial(FP16.encode, tensor), "compiled": partial(torch.compile(FP16.encode), tensor)}
    calls["compiled"]()
    yield "encode a tensor", measured(calls | {"PyTorch": tensor.half}, limit)
    calls = {"BF16.encode": partial(BF16.encode, tensor), "PyTorch": tensor.bfloat16}
    yield "encode a tensor in BF16", measured(calls, limit)


def by_gfloat(x):
    """The same by gfloat, if it is installed."""
    try:
        import gfloat.formats
    except ImportError:
        return {}
    info = gfloat.formats.format_info_binary16
    return {"gfloat": lambda: gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x))}
