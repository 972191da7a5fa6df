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
from minizero import DDP, GPT, GPTConfig, Zero3, all_reduce, barrier, cross_entropy_in_chunks
from minizero.memory import Ledger
from minizero.memory.operators import Watcher
from minizero.models.gpt import RECOMPUTE
from minizero.ranks.collectives import all_gather, reduce_scatter
from minizero.ranks.one_of_many import one_of_many
from minizero.recompute import by_function, by_hooks, checkpoint, checkpoint_selective, keep_matmuls
from minizero.simulate.machine import STAGES, compare
from minizero.simulate.published import TORCHTITAN_GIB
from minizero.xray.case import Case, case_of
from minizero.xray.fake import Copier, pretend
from minizero.xray.hugging_face import batch_for, switch_caches_off
from minizero.xray.plan import Plan
from minizero.xray.report import Report
from minizero.xray.step import measure
from precision import BF16, FP16
from tests.bench.allocators import profile_step

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
            yield f"{name}, {title}", measured(calls, limit, lambda way: profile_step(calls[way]).peak)  # noqa: B023
    RECOMPUTE["full"] = checkpoint


def loss(limit, tokens=1024, width=128, vocabulary=16384):
    """The loss in chunks: forward and backward, and the peak above the start, the gradients in it."""

    def theirs(*given, **options):
        chosen = torch.nn.LinearCrossEntropyOptions(chunking_method=None, **options) if options else None
        return F.linear_cross_entropy(*given, options=chosen)

    def step(loss_of, hidden, weight, targets):
        loss_of(hidden, weight, targets).backward()
        hidden.grad = weight.grad = None

    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.randn(n, width).mul(0.3).to(dtype).requires_grad_() for n in (tokens, vocabulary)]
        given.append(torch.randint(vocabulary, (tokens,)))
        for chunk in (None, 32, 128, 512):
            ways = {"in chunks": partial(cross_entropy_in_chunks, chunk=chunk)}
            if chunk is None:
                ways = {"plain": lambda hidden, weight, y: F.cross_entropy(F.linear(hidden, weight).float(), y)}
            if hasattr(F, "linear_cross_entropy"):  # since 2.13
                ways["linear_cross_entropy"] = partial(theirs, **({"batch_chunk_size": chunk} if chunk else {}))
            calls = {name: partial(step, way, *given) for name, way in ways.items()}
            size = f"{str(dtype).removeprefix('torch.')}, {chunk or tokens} tokens at a time"
            yield size, measured(calls, limit, lambda name: profile_step(calls[name]).peak)  # noqa: B023


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


def scale(limit):
    """The simulator: constants from steps of 2 ranks on this machine, steps of 4 and 8 predicted."""
    for row in compare(rounds=max(2, round(limit)))[0]:
        kind = "fitted" if row.ranks == 2 else "predicted"
        found = {"measured": {"ms": 1e3 * row.measured}, kind: {"ms": 1e3 * row.simulated}}
        yield f"{STAGES[row.stage].__name__}, {row.ranks} ranks", found


def xray(limit):
    """The peak of one rank's step on fake tensors, beside a real step's, PyTorch's tracker's and published ones.

    Published: torchtitan's table of Llama 3 8B (H100, FSDP2, selective recompute of every second block), what the
    allocator had reserved; and Zhao et al., 2023, "PyTorch FSDP": T5-11B trains on A100s of 80 GB.
    """
    gpts = {"the demo's GPT": (2, {}), "its sequences of 512": (4, {"sequence_length": 512})}
    gpts["its vocabulary 32,000"] = 4, {"vocabulary": 32_000, "sequence_length": 256}
    for size, (batch, options) in gpts.items():
        config = GPTConfig(**options)
        tokens = torch.zeros(2, batch, config.sequence_length, dtype=torch.long).unbind()
        case = Case(GPT(config), tokens)
        ways = {"X-ray": partial(peak_of, case), "a real step": partial(real_peak, GPT(config), tokens)}
        yield size, {name: timed(way) for name, way in (ways | {"MemTracker": partial(by_mem_tracker, case)}).items()}
    report = Report(model_of("GPT2", 1, 2048, n_embd=8192, n_layer=80, n_head=64, n_positions=2048), 8, "")
    found = {"picture": timed(lambda: report.peak["total"])}
    yield "a GPT of 65 B", found | {"what would help": {"ms": timed(lambda: len(report.outcomes))["ms"]}}
    shapes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    shapes |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    case = model_of("Llama", 2, 8192, **shapes)
    switch_caches_off(case.model)
    for path in [f"model.layers.{number}" for number in range(32)]:
        case.model.set_submodule(path, Selective(case.model.get_submodule(path)))
    for ranks, printed in TORCHTITAN_GIB.items():
        found = timed(partial(peak_of, case, stage=3, ranks=ranks, dtype=torch.bfloat16))
        yield f"Llama 3 8B, ZeRO-3 on {ranks}", {"X-ray": found, "published": {"MiB": 1024 * printed}}
    shapes = {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}
    for batch in (8, 16):
        case = model_of("T5", batch, 512, decoder_start_token_id=0, **shapes)
        plans = {"X-ray": False, "with recompute": True}
        options = {"stage": 3, "ranks": 8, "dtype": torch.bfloat16}
        found = {name: timed(partial(peak_of, case, recompute=again, **options)) for name, again in plans.items()}
        yield f"T5-11B, {batch} × 512, ZeRO-3 on 8", found | {"published, at most": {"MiB": 1024 * 74.5}}


def timed(peak):
    """Time of `peak()` by the clock, since it may start processes; and the MiB that it finds."""
    start = time.perf_counter()
    held = peak()
    return {"ms": 1e3 * (time.perf_counter() - start), "MiB": held / MIB}


def peak_of(case, **plan):
    return case.run(Plan(**plan)).peak["total"]


def real_peak(model, tokens):
    return measure(model, tokens, Plan(), torch.optim.AdamW, one_of_many(1)).ledger.peak["total"]


def model_of(kind, batch, length, **shapes):
    """A case of a model of Hugging Face, on "meta"."""
    import transformers

    transformers.logging.set_verbosity_error()
    task = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")

    def make():
        model = getattr(transformers, kind + task)(getattr(transformers, f"{kind}Config")(**shapes))
        return model, batch_for(model, batch, length)

    return case_of(make, partial(torch.optim.AdamW, foreach=True))  # as on a GPU


class Selective(nn.Module):
    """A block that keeps its matrix products, and computes the rest again."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint_selective(keep_matmuls, self.block, *args, **kwargs)


def by_mem_tracker(case):
    """The peak that PyTorch's own tracker finds in two steps on the same fake tensors."""
    with pretend() as mode:
        (model, inputs), tracker = Copier(mode).copy((case.model, case.inputs)), MemTracker()
        optimizer = torch.optim.AdamW(model.parameters())
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                training(model, optimizer, *(tensor.clone() for tensor in inputs))()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
