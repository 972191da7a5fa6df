"""The scenes of the questions: of each exercise of the core a small drawn case, in words and as a run (questions.py).

A scene is called as its exercise, and has numbers that a person can follow. Its run returns what one may be asked about
its end: a dict of questions with their values, each a number, a word, or a list of numbers.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, cast
from unittest import mock

import torch

from flash import tiled
from minizero import DDP
from minizero import accumulate as module
from minizero.memory import Ledger, formulas
from minizero.ranks import collectives
from minizero.ranks.transport import Transport
from minizero.recompute import by_function
from precision import one_number
from precision.scaling import DynamicLossScaler
from tests.exercises.e08_ddp_hook import Engine
from tests.exercises.e08_ddp_hook import Unit as Bucketed
from tests.exercises.kit import ranks
from tests.exercises.tasks import zero2, zero3


class Scene(NamedTuple):
    """words: the case. run: runs it with the function that stands in the package at that moment."""

    words: str
    run: Callable[[], dict[str, Any]]


def reduce_scatter(random: Random) -> Scene:
    n, length, factor = random.randint(6, 9), random.randint(2, 7), random.choice((2, 3, -2))

    def combine(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.add(b, a, alpha=factor, out=out)

    def on_rank(comm: Any) -> tuple[float, int]:
        chunks = [torch.full((length,), float((comm.rank + 2 * c) % 3)) for c in range(n)]
        with Ledger() as ledger:
            got = collectives.ring_reduce_scatter(chunks, comm, combine)
        return got[0].item(), ledger.peak["total"]

    def run() -> dict[str, Any]:
        numbers, peaks = zip(*ranks(n, on_rank))
        return {
            "Which number does each rank return, from rank 0 on?": numbers,
            "How many bytes of new tensors are alive at most on a rank, at one moment?": max(peaks),
        }

    words = f"{n} ranks. Chunk c of rank k is {length} FP32 numbers, all of them (k + 2c) mod 3. "
    buffers = Transport.ring_buffers(cast(Any, None), torch.ones(length))
    return Scene(words + f"combine(a, b) is {factor} a + b. ring_buffers gives {buffers}.", run)


def ddp_hook(random: Random) -> Scene:
    n = random.randint(3, 6)
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    units = [(n * random.randint(2, 9), random.choice(dtypes)) for _ in range(10)]
    total = sum(elements * dtype.itemsize for elements, dtype in units)
    limit = total // random.choice((4, 5, 6))

    def on_rank(comm: Any) -> tuple[list[int], list[int], int]:
        made = [Bucketed(f"unit {i}", *unit) for i, unit in enumerate(units)]
        engine, seen, given = cast(Any, Engine(comm, made)), list[str](), []
        comm.observers.append(lambda operation, *_: seen.append(operation))
        messages: list[int] = []
        for unit in made:
            DDP.reduce(engine, cast(Any, unit), torch.ones(unit.size, dtype=unit.dtype))
            messages.append(len(seen) - sum(messages))
            given.append(sum(bool(unit.averages) for unit in made))
        return messages, given, comm.bytes_sent

    def run() -> dict[str, Any]:
        with (
            mock.patch.dict(DDP.reduce.__globals__, {"BUCKET_BYTES": limit}),
            mock.patch("minizero.engines.ddp.BUCKET_BYTES", limit),
        ):
            messages, given, sent = ranks(n, on_rank)[1]
        return {
            "How many all-reduces does each of the 10 calls make, in their order?": messages,
            "How many units have their average after each of the 10 calls?": given,
            "How many bytes has rank 1 sent after the 10 calls?": sent,
        }

    sizes = ", ".join(f"{elements} of {str(dtype)[6:]}" for elements, dtype in units)
    return Scene(f"{n} ranks, BUCKET_BYTES = {limit}, one backward. Elements of the units as they come: {sizes}.", run)


def zero2_free(random: Random) -> Scene:
    n, dtype = random.randint(3, 6), random.choice((torch.float32, torch.bfloat16))
    elements = [random.randint(2, 9) * n - random.choice((0, 1, 2)) for _ in range(4)]

    def on_rank(comm: Any) -> tuple[list[int], int, float]:
        held: list[int] = []
        shards: dict[str, torch.Tensor] = {}
        with Ledger() as ledger:
            for _ in range(2):

                def arrivals():
                    for i, number in enumerate(elements):
                        held.append(ledger.current["total"])
                        yield f"unit {i}", torch.full((number,), float(comm.rank + 1), dtype=dtype)

                zero2.backward(arrivals(), shards, comm)
        return held, comm.bytes_sent, shards["unit 3"].sum().item()

    def run() -> dict[str, Any]:
        held, sent, total = ranks(n, on_rank)[1]
        return {
            "How many bytes are alive on rank 1 when the first micro-batch computes its 4 gradients?": held[:4],
            "How many bytes are alive on rank 1 when the second micro-batch computes its 4 gradients?": held[4:],
            "How many bytes has rank 1 sent after both micro-batches?": sent,
            "What is the sum of rank 1's shard of unit 3 in the end?": total,
        }

    words = f"{n} ranks, two micro-batches of 4 units with {', '.join(map(str, elements))} elements of "
    return Scene(words + f"{str(dtype)[6:]}. All gradients of rank r are r + 1.", run)


def zero3_unshard(random: Random) -> Scene:
    n, dtype = random.randint(3, 6), random.choice((torch.float32, torch.float16))
    elements = random.randint(5, 30)
    free, step = "memory given back", "step"
    between = [random.choice((free, step, "nothing")) for _ in range(8)]

    def on_rank(comm: Any) -> tuple[list[int], list[float]]:
        unit, sent, first = zero3.Unit([torch.ones(elements)], comm, dtype), [], []
        for event in ["nothing", *between]:
            if event == free:
                unit.replica.untyped_storage().resize_(0)
            elif event == step:
                unit.shard += comm.rank + 1
            before = comm.bytes_sent
            zero3.unshard(unit)
            sent.append(comm.bytes_sent - before)
            first.append(unit.parameters[0].detach()[[0, -1]].sum().item())
        return sent, first

    def run() -> dict[str, Any]:
        sent, first = ranks(n, on_rank)[1]
        return {
            "How many bytes does rank 1 send in each of the 9 calls?": sent,
            "What is the first element of the whole parameter plus its last one, on rank 1 after each call?": first,
        }

    words = f"{n} ranks, a unit of {elements} ones, to be computed with in {str(dtype)[6:]}. Nine calls of unshard; "
    words += f"between them: {', '.join(between)}. (A step adds r + 1 to the shard of rank r.)"
    return Scene(words, run)


def memory_formulas(random: Random) -> Scene:
    n = random.choice((4, 8, 16))
    stage, factor = random.randint(1, 3), random.choice((None, 2, 4))
    psi, convention = 100 * n * random.randint(3, 30), random.choice(("minizero", "minizero", "paper"))
    dtypes = (torch.float32, torch.float16)

    def run() -> dict[str, Any]:
        options: dict[str, Any] = dict(sharding_factor=factor, convention=convention)
        of = [[formulas.predict(psi, n, s, dtype=d, **options) for d in dtypes] for s in (stage - 1, stage)]
        parts = ("parameters", "gradients", "optimizer", "total")
        saved = [before["total"] - after["total"] for before, after in zip(*of)]
        return {
            f"How many bytes less is `total` in stage {stage} than in stage {stage - 1}, in FP32 and in FP16?": saved,
            "What are the four values in FP16 (parameters, gradients, optimizer, total)?": [of[1][1][p] for p in parts],
            f"What is `total` in FP32 and in FP16 in stage {stage - 1}?": [each["total"] for each in of[0]],
        }

    return Scene(f"Ψ = {psi}, {n} ranks, stage {stage}, sharding_factor {factor}, convention {convention!r}.", run)


def round_even(random: Random) -> Scene:
    drop, again, sign = random.randint(2, 4), random.randint(1, 2), random.randint(0, 1)
    numbers = [(2 * random.randint(8, 60) + 1) << drop - 1 for _ in "ab"] + random.sample(range(100, 999), 4)
    roundings = random.sample(("nearest-even", "nearest-away", "up", "down", "toward-zero"), 3)

    def run() -> dict[str, Any]:
        once = [[one_number.round_off(s, drop, sign, rounding) for s in numbers] for rounding in roundings]
        twice = [[one_number.round_off(s, again, sign, r) for s in each] for r, each in zip(roundings, once)]
        return {
            f"What are the results of the rounding {roundings[0]}?": once[0],
            "What is the sum of the results, in each rounding?": [sum(each) for each in once],
            f"Each result is rounded again, with drop {again}. What is the sum then, in each rounding?": [
                sum(each) for each in twice
            ],
        }

    words = f"round_off of the significands {', '.join(map(str, numbers))}, with drop {drop} and sign {sign}, in the "
    return Scene(words + f"roundings {', '.join(roundings)}, one after the other.", run)


def dynamic_scaler(random: Random) -> Scene:
    interval = random.randint(2, 4)
    grow, back = random.choice((2.0, 4.0)), random.choice((0.5, 0.25))
    low, high, tracker = 256.0, 16384.0, random.choice((0, 1, 5))
    updates = "".join(random.choices("....x", k=32))

    def run() -> dict[str, Any]:
        scaler = DynamicLossScaler(1024.0, grow, back, interval, low, high)
        scaler._growth_tracker = tracker
        scales, trackers = [], []
        for update in updates:
            scaler._adapt(update == "x")
            scales.append(scaler.get_scale())
            trackers.append(scaler._growth_tracker)
        return {
            "What is the scale after updates 8, 16, 24 and 32?": scales[7::8],
            "What is the tracker after updates 8, 16, 24 and 32?": trackers[7::8],
            "How many of the updates change the scale?": sum(a != b for a, b in zip([1024.0, *scales], scales)),
        }

    words = f"The scale begins at 1024, the tracker at {tracker}; growth_interval {interval}, growth_factor {grow:g}, "
    words += f"backoff_factor {back:g}, min_scale {low:g}, max_scale {high:g}. Updates (x has an overflow): {updates}"
    return Scene(words, run)


def checkpoint(random: Random) -> Scene:
    """Blocks in blocks: what is inside runs again whenever one of those around it does."""
    nested, times = random.choice(((2, 2), (3, 1), (3, 2)))
    after = random.randint(1, 2)
    weights = [random.choice((2.0, 3.0, -2.0, 0.5)) for _ in range(nested + after)]
    given = random.choice((2.0, 3.0, -2.0, 5.0))

    def run() -> dict[str, Any]:
        ran: list[int] = []
        parameters = [torch.tensor(w, requires_grad=True) for w in weights]

        def block(number: int, inside: Callable | None) -> Callable:
            def fn(x: torch.Tensor) -> torch.Tensor:
                ran.append(number)
                for _ in range(times if inside else 0):
                    x = by_function(cast(Callable, inside), x)
                return parameters[number - 1] * (x if inside else x + number)

            return fn

        inside = None
        for number in range(nested, 0, -1):
            inside = block(number, inside)
        start = torch.tensor(given, requires_grad=True)
        x = by_function(cast(Callable, inside), start)
        for number in range(nested + 1, nested + after + 1):
            x = by_function(block(number, None), x)
        forward = len(ran)
        x.backward()
        return {
            "Which blocks run during backward, in their order?": ran[forward:],
            f"How often does block {nested} run in all?": ran.count(nested),
            "What is the gradient of x?": 0.0 if start.grad is None else start.grad.item(),
            "What are the gradients of w1, w2, …?": [0.0 if p.grad is None else p.grad.item() for p in parameters],
        }

    around = "checkpoint(block {0}, x)" if times == 1 else "checkpoint(block {0}, checkpoint(block {0}, x))"
    outer = ", ".join(f"block {i}(x) = w{i} · {around.format(i + 1)}" for i in range(nested - 1, 0, -1))
    rest = " and then ".join(f"checkpoint(block {i}, ·)" for i in range(nested + 1, nested + after + 1))
    words = f"block {nested}(x) = w{nested} (x + {nested}), {outer}. Called is checkpoint(block 1, x), then {rest}; "
    words += f"each later block i is wi (x + i). Then .backward(). x = {given:g}, "
    words += f"w1, w2, … = {', '.join(f'{w:g}' for w in weights)}. "
    return Scene(words + "(checkpoint is the function whose backward you wrote.)", run)


def accumulation(random: Random) -> Scene:
    counts = [random.choice((0, 1, 2, 3, 4)) for _ in range(6)]
    counts.append(next(n for n in (4, 5, 8, 10, 16, 20, 25) if n > sum(counts)) - sum(counts))
    values = [random.randint(-4, 4) for _ in counts]
    weight, left = float(random.randint(1, 3)), float(random.randint(-2, 2))

    def run() -> dict[str, Any]:
        model = _Scalar(weight)
        model.w.grad = torch.tensor(left)
        window = []
        for number, value in zip(counts, values):
            y = torch.full((number + 2,), -100)
            y[:number] = value
            window.append((torch.tensor(float(value)), y))
        loss = module.accumulate(model, window)
        return {
            "What is returned?": float(loss),
            "What is w.grad in the end?": model.w.grad.item(),
            "What is w.grad at the moments when the model's forward begins?": model.seen,
        }

    words = f"A model with one weight w = {weight:g}; its loss is the mean of (w - y)² over the targets y that are not "
    words += f"-100. Before the call w.grad is {left:g}. Micro-batches: " + "; ".join(
        f"{number} targets, all {value}, and 2 of -100" for number, value in zip(counts, values)
    )
    return Scene(words + ".", run)


class _Scalar(torch.nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(weight))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(0.0 if self.w.grad is None else self.w.grad.item())
        targets = y[y != -100]
        return (self.w - targets).square().mean()


def online_softmax(random: Random) -> Scene:
    block = random.randint(2, 3)
    exponents = [random.randint(-3, 4) for _ in range(block * 5 + random.randint(1, block - 1))]
    values = [random.randint(-2, 3) for _ in exponents]

    def run() -> dict[str, Any]:
        scores = torch.tensor(exponents, dtype=torch.float64) * math.log(2)
        steps = tiled.online_softmax(scores, torch.tensor(values, dtype=torch.float64)[:, None], block)
        return {
            "What is `rescale` in each of the 6 steps?": [float(step.rescale) for step in steps],
            "What is `total` in each of the 6 steps?": [float(step.total) for step in steps],
            "What is the last step's output times the last step's total?": float(steps[-1].output * steps[-1].total),
        }

    words = f"Blocks of {block} keys. The scores are ln 2 times {exponents}, so that exp(score) is a power of 2. The "
    return Scene(words + f"values have one column: {values}.", run)
