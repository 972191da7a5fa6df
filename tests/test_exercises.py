"""The course: references pass, stubs and wrong answers do not, and each wrong answer gets its own diagnosis."""

import ast
import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import time

import pytest
import torch

from minizero import barrier
from precision import blocks
from tests.exercises import commands, kit, selfcheck, stubs
from tests.exercises.breaking import broken
from tests.exercises.course import COURSE, ROOT, find
from tests.exercises.definition import definition
from tests.exercises.machine import checker, judge
from tests.exercises.machine.one_core import one_core
from tests.exercises.number_kit import bare
from tests.exercises.patch import holder_of
from tests.exercises.tasks import block, bug_muon
from tests.exercises.workbook import Workbook

POSSIBLE = [exercise for exercise in COURSE if exercise.is_possible()]
each = pytest.mark.parametrize("exercise", POSSIBLE, ids=lambda exercise: f"{exercise.id}_{exercise.name}")
RING, SLOW = find("reduce_scatter"), pytest.mark.slow


@pytest.fixture(scope="session")
def another_process():
    """One that has imported torch, and may be interrupted."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, selfcheck.prepare) as pool:
        yield lambda *args: pool.submit(selfcheck.check_checks, *args).result()


@pytest.fixture(scope="module")
def host():
    """Each answer runs in a child of it, as in `checker.run`, and torch is imported once."""
    with checker.Checker() as one:
        yield one


@pytest.fixture
def workbook(tmp_path):
    book = Workbook(tmp_path / "workbook")
    book.fill()
    return book


# The checks are checked.


@pytest.mark.slow
@each
def test_the_reference_passes_and_the_stub_does_not(exercise, another_process):
    for said in another_process(exercise, "reference") + another_process(exercise, "stub"):
        assert said.outcome.name == said.expected, f"{said.answer}: {said.outcome}"


@pytest.mark.slow
@each
def test_a_wrong_answer_is_told_what_is_wrong(exercise, another_process):
    (said,) = another_process(exercise, "one")
    assert said.outcome.status == "failed" and said.outcome.name == said.expected, f"{said.answer}: {said.outcome}"


@pytest.mark.soak
@each
def test_every_wrong_answer_is_told_what_is_wrong(exercise, another_process):
    wrong = [
        s for s in another_process(exercise, "all") if (s.outcome.status, s.outcome.name) != ("failed", s.expected)
    ]
    assert not wrong, "\n".join(f"{s.answer} should be told {s.expected}, and was: {s.outcome}" for s in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation", "chunked_loss"])
def test_a_reference_passes_in_a_process_of_its_own(name, tmp_path):
    """As a student checks it: PyTorch loads its compiler there in the middle of a case."""
    path = tmp_path / find(name).file
    path.write_text(stubs.answer(find(name)))
    outcome = checker.run(find(name), path)
    assert outcome.status == "passed", outcome


def test_the_course_is_whole():
    assert [exercise.number for exercise in COURSE] == list(range(1, len(COURSE) + 1))
    assert len({exercise.name for exercise in COURSE}) == len(COURSE) >= 30
    assert sum(exercise.core for exercise in COURSE) == 10
    assert all(10 <= exercise.minutes <= 60 for exercise in COURSE)
    assert all((ROOT / "notebooks" / f"{exercise.notebook}.ipynb").is_file() for exercise in COURSE)
    with pytest.raises(ValueError, match="no row of NOTEBOOKS"):
        COURSE[0]._replace(number=10**6).notebook  # noqa: B018
    lessons = [exercise.load() for exercise in COURSE]
    texts = [(lesson.PLAN, lesson.HINTS, lesson.AFTER) for lesson in lessons]
    assert [exercise.text()[1:4] for exercise in COURSE] == texts
    for lesson in lessons:
        names = [wrong.name for wrong in lesson.WRONG]
        assert 4 <= len(names) <= 8 and len(set(names)) == len(names), lesson.__name__  # each has a diagnosis
        assert 2 <= len(lesson.HINTS) <= 4 and all(hint.strip() for hint in lesson.HINTS), lesson.__name__
        assert lesson.PLAN and lesson.__doc__


def test_what_is_told_after_an_exercise_is_short_and_ends_with_what_to_read():
    told = {exercise.id: exercise.text().after for exercise in COURSE}
    for id_, words in told.items():
        *sentences, last = re.split(r"(?<=[.!?]) ", words)
        assert 2 <= len(sentences) <= 5 and len(words.split()) <= 110, id_
        assert last.startswith("Read next: ") and ("/" in last or ", section " in last), id_


def test_what_an_exercise_names_is_there():
    """A file of ours; a function in it, a section of it by its number, or by its title."""
    place = r"(?:minizero|flash|precision|notebooks|tests)/[\w/]+\.\w+"
    for exercise in COURSE:
        for function, number, title, path in re.findall(
            rf'(?:`(\w+)` in |section (\d+) of |"([^"]+)" in )?({place})', exercise.text().after
        ):
            assert (ROOT / path).is_file(), f"{exercise.id}: {path}"
            words = f"def {function}(" if function else f"## {number}. " if number else f"# {title}" if title else ""
            assert words in (ROOT / path).read_text(encoding="utf-8"), f"{exercise.id}: {words} in {path}"


@each
def test_a_function_is_found_once_and_only_in_the_files_that_the_course_names(exercise):
    here = definition(exercise)
    assert here.module.startswith(exercise.place) and here.node.name == exercise.function
    holder = holder_of(exercise)
    found = vars(holder)[exercise.function]
    assert getattr(found, "fn", found).__module__ == here.module  # a Triton kernel is wrapped in an object
    assert isinstance(holder, type) == exercise.is_method()


@pytest.mark.slow
def test_a_function_that_is_missing_or_there_twice_is_an_error():
    at_home = RING._replace(place="tests.exercises", target="Exercise.load")
    assert definition(at_home).full_name == "tests.exercises.course.Exercise.load"
    assert definition(at_home._replace(place="tests.exercises.course")).full_name == definition(at_home).full_name
    with pytest.raises(ValueError, match="exercise 05: Exercise.lode must be in one file .* is in no file"):
        definition(at_home._replace(target="Exercise.lode"))
    with pytest.raises(ValueError, match="is in .*tests.exercises.commands, .*tests.exercises.e36_triton_forward, "):
        definition(at_home._replace(target="check"))
    with pytest.raises(ValueError, match="no file"):
        definition(at_home._replace(place="tests.exorcises"))


@pytest.mark.slow
def test_a_first_hint_is_no_code():
    """No whole line of the reference stands in it."""
    for exercise in COURSE:
        lines = [line.strip() for line in stubs.reference(exercise).splitlines() if len(line.strip()) > 25]
        assert not [line for line in lines if line in exercise.text().hints[0]], exercise


# As a student might write them, with the signature cut off.
OTHER_ANSWERS = {
    "pad": """(tensor, multiple):
    rows = (tensor.shape[0] + multiple - 1) // multiple * multiple
    if rows == len(tensor):
        return tensor
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded""",
    "all_gather": """(chunks, comm):
    current = comm.rank
    comm.transport.soon([chunks[(comm.rank - k) % comm.size] for k in range(1, comm.size)], (comm.rank - 1) % comm.size)
    for _ in range(comm.size - 1):
        before = (current - 1) % comm.size
        comm.send_recv(chunks[current], (comm.rank + 1) % comm.size, chunks[before], (comm.rank - 1) % comm.size)
        current = before""",
    "reduce_scatter": """(chunks, comm, combine=torch.add, out=None):
    n, me = comm.size, comm.rank
    acc = chunks[me - 1]
    room = [torch.empty_like(acc), torch.empty_like(acc)]
    for k in range(n - 1):
        incoming = room[k & 1]
        comm.send_recv(acc, (me + 1) % n, incoming, (me - 1) % n)
        own = chunks[(me - k - 2) % n]
        if k == n - 2 and out is not None:
            combine(incoming, own, out=out)
            return out
        acc = combine(incoming, own)
    return acc""",
    "ddp_hook": """(self, unit, gradient):
    if unit is self.in_order[0]:
        self.waiting = []
    self.waiting.append((unit, gradient))
    last = unit is self.in_order[-1]
    for dtype in dict.fromkeys(u.dtype for u, _ in self.waiting):
        full = [(u, g) for u, g in self.waiting if u.dtype == dtype]
        if last or sum(g.nbytes for _, g in full) >= BUCKET_BYTES:
            self.waiting = [(u, g) for u, g in self.waiting if u.dtype != dtype]
            averages = all_reduce(torch.cat([g for _, g in full]), self.comm, "mean")
            for (u, _), average in zip(full, averages.split([u.size for u, _ in full])):
                u.set_gradient(average, full=average)""",
    "zero2_free": """(arrivals, shards, comm):
    while True:
        name, gradient = next(arrivals, (None, None))
        if name is None:
            return
        gradient = reduce_scatter(pad(gradient, comm.size), comm, "mean")
        before = shards.get(name, gradient.new_zeros(gradient.shape).float())
        shards[name] = before + gradient.float()
        del gradient""",
    "views": """(parameters, ranks):
    places, offset = {}, 0
    for p in parameters:
        if id(p) not in places:
            places[id(p)] = slice(offset, offset + p.numel())
            offset += p.numel()
    flat = parameters[0].detach().new_zeros((offset + ranks - 1) // ranks * ranks)
    for p in parameters:
        values = p.detach().clone()
        p.data = flat[places[id(p)]].view(p.shape)
        p.data.copy_(values)
    return flat""",
    "zero3_unshard": """(unit):
    storage = unit.replica.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(unit.replica.numel() * unit.replica.element_size())
        unit.version = None
    if unit.version != unit.shard._version:
        unit.version = unit.shard._version
        all_gather(unit.shard.to(unit.replica.dtype), unit.comm, out=unit.replica)
    unit.point_parameters_at(unit.replica)""",
    "zero3_reshard": """(unit, gradient):
    unit.empty_parameters()
    unit.replica.untyped_storage().resize_(0)
    if gradient is not None:
        if unit.gradient is not None:
            gradient += unit.gradient
        unit.gradient = gradient
        if unit.uses == 0:
            mine = reduce_scatter(gradient, unit.comm, "mean").float()
            unit.average = mine if unit.average is None else unit.average + mine
            unit.gradient = None""",
    "zero3_hooks": """(unit, module, stays):
    hooks = Hooks(unit, stays)
    for parameter in unit.parameters:
        parameter.register_post_accumulate_grad_hook(hooks.arrive)
    module.register_forward_hook(hooks.end)
    module.register_forward_pre_hook(hooks.begin)


class Hooks:
    def __init__(self, unit, stays):
        self.unit, self.stays, self.owed = unit, stays, set(unit.parameters)

    def begin(self, module, inputs):
        if 0 < len(self.owed) < len(self.unit.parameters):
            raise RuntimeError("a gradient is missing")
        self.again()

    def again(self, *_):
        self.unit.release()
        self.unit.gather()

    def end(self, module, inputs, output):
        if not output.requires_grad or not self.stays:
            self.unit.release()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.unit.gather())

    def arrive(self, parameter):
        self.owed.remove(parameter)
        if not self.owed:
            self.owed.update(self.unit.parameters)
            self.unit.release()
            self.unit.reduce()""",
    "hybrid": """(shard, gradient_of, comm, factor, rate):
    machine = comm.split(comm.rank // factor)
    mine = reduce_scatter(gradient_of(all_gather(shard, machine)), machine) / comm.size
    others = comm.split(comm.rank % factor)
    return shard - rate * all_reduce(mine, others)""",
    "subnormals": """(x, fmt):
    if x == 0 or math.isinf(x) or math.isnan(x):
        return x
    step = fmt.smallest_normal / 2**fmt.mantissa_bits
    while abs(x) >= step * 2 ** (fmt.mantissa_bits + 1):
        step *= 2
    steps, rest = divmod(abs(x) / step, 1)
    steps += rest > 0.5 or (rest == 0.5 and steps % 2 == 1)
    result = steps * step
    if result > fmt.max:
        result = math.inf
    if result < fmt.smallest_normal and not fmt.subnormals:
        result = 0.0
    return -result if x < 0 else result""",
    "lost_update": """(weight, up, fmt):
    size = abs(weight)
    low, high = 0, fmt.max_bits
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if number(middle, fmt) < size else (low, middle)
    if weight == 0 or up == (weight > 0):
        return (number(low + 1, fmt) - size) / 2, low % 2 == 0
    return (size - number(low - 1, fmt)) / 2, low % 2 == 0


def number(code, fmt):
    field, mantissa = divmod(code, 2**fmt.mantissa_bits)
    return math.ldexp(mantissa + 2**fmt.mantissa_bits * (field > 0), max(field, 1) - fmt.bias - fmt.mantissa_bits)""",
    "decode": """(bits, fmt):
    sign, code = bits >> (fmt.width - 1), bits & (2 ** (fmt.width - 1) - 1)
    field, mantissa = code >> fmt.mantissa_bits, code & (2**fmt.mantissa_bits - 1)
    if code == fmt.infinity_bits:
        value = float("inf")
    elif code > fmt.max_bits:
        value = float("nan")
    elif field:
        value = (1 + mantissa / 2**fmt.mantissa_bits) * 2.0 ** (field - fmt.bias)
    else:
        value = mantissa / 2**fmt.mantissa_bits * 2.0 ** (1 - fmt.bias) * fmt.subnormals
    return -value if sign else value""",
    "online_softmax": """(scores, values, block=1):
    m, l, o, steps = float("-inf"), 0.0, 0 * values[0], []
    for keys in [range(i, min(i + block, len(scores))) for i in range(0, len(scores), block)]:
        new = max(m, float(scores[list(keys)].max()))
        p = torch.exp(scores[list(keys)] - new)
        r = math.exp(m - new)
        l, o, m = l * r + float(p.sum()), o * r + (p[:, None] * values[list(keys)]).sum(0), new
        steps.append(Step(keys, m, r, l, o / l))
    return steps""",
    "attention_backward": """(q, k, v, dout, causal=False):
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            dq[b, h], dk[b, h], dv[b, h] = head(q[b, h], k[b, h], v[b, h], dout[b, h], causal)
    return dq, dk, dv


def head(q, k, v, dout, causal):
    c = q.shape[1] ** -0.5
    s = (q @ k.T) * c
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), float("-inf"))
    e = (s - s.max(1, keepdim=True).values).exp()
    p = e / e.sum(1, keepdim=True)
    dp = dout @ v.T
    ds = (dp - (dp * p).sum(1, keepdim=True)) * p * c
    return ds @ k, ds.T @ q, p.T @ dout""",
    "predict_peak": """(stage, ranks, root, blocks, states=2, bytes_each=4):
    total, n = root + sum(blocks), ranks if stage else 1
    if stage < 2:
        most = total * (3 - stage)
    else:
        done = [sum(blocks[i + 1:]) // ranks for i in range(len(blocks))]
        each = [(1 + (stage == 3)) * b + b // ranks + d for b, d in zip(blocks, done)]
        most = max([*each, total // ranks]) + root
        most += total // ranks + root if stage == 3 else total
    return (most + states * total // n) * bytes_each""",
    "bug_accumulation": """(model, optimizer, windows, comm):
    losses = []
    for window in windows:
        counts = [int((y != -100).sum()) for _, y in window]
        total = float(all_reduce(torch.tensor(sum(counts)), comm))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        mine = 0.0
        for (x, y), n in zip(window, counts):
            if n:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * n / total * comm.size
                loss.backward()
                mine += float(loss)
        for p in model.parameters():
            p.grad = all_reduce(p.grad, comm, "mean")
        optimizer.step()
        losses.append(float(all_reduce(torch.tensor(mine), comm, "mean")))
    return losses""",
    "bug_clipping": """(model, batches, max_norm, learning_rate, comm):
    count = sum(p.numel() for p in model.parameters())
    mine = pad(parameters_to_vector(model.parameters()).detach(), comm.size).chunk(comm.size)[comm.rank].clone()
    momentum, norms = torch.zeros_like(mine), []
    for x, y in batches:
        gradients = torch.autograd.grad(model(x, y), list(model.parameters()))
        g = reduce_scatter(pad(parameters_to_vector(gradients), comm.size), comm, "mean")
        norm = float(all_gather(g.norm().view(1), comm).norm())
        momentum = 0.9 * momentum + g * min(1.0, max_norm / (norm + 1e-6))
        mine -= learning_rate * momentum
        vector_to_parameters(all_gather(mine, comm)[:count], model.parameters())
        norms.append(norm)
    return norms""",
    "bug_loss_scale": """(model, optimizer, scaler, batches, max_norm):
    log = []
    for x, y in batches:
        model.zero_grad()
        loss, scale = model(x, y), scaler.get_scale()
        scaler.scale(loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm * scale) / scale
        scaler.step(optimizer)
        scaler.update()
        log.append((float(loss), float(norm)))
    return log""",
    "bug_random": """(model, examples, epochs, batch_size, seed, comm):
    x, y = examples
    optimizer, means = torch.optim.SGD(model.parameters(), lr=0.05), []
    for epoch in epochs:
        streams = np.random.SeedSequence(seed, spawn_key=(epoch,)).spawn(comm.size + 1)
        order = np.random.default_rng(streams[-1]).permutation(len(x)).reshape(-1, comm.size, batch_size)
        noise = np.random.default_rng(streams[comm.rank]).standard_normal((*order[:, 0].shape, *x.shape[1:]))
        total = torch.zeros(())
        for numbers, n in zip(order[:, comm.rank], noise):
            loss = model(x[numbers] + 0.1 * torch.tensor(n).float(), y[numbers])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for p, g in zip(model.parameters(), gradients):
                p.grad = all_reduce(g, comm) / comm.size
            optimizer.step()
            total += loss.detach() / len(order)
        means.append(float(all_reduce(total, comm, "mean")))
    return means""",
    "bug_recompute": """(model, optimizer, batches):
    from minizero.recompute import checkpoint as ours

    def again(block, hidden):
        state, runs = torch.get_rng_state(), []

        def run(hidden):
            runs.append(1)
            if len(runs) == 1:
                return block(hidden)
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                return block(hidden)

        return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)

    losses = []
    for x, y in batches:
        model.zero_grad()
        x = model.stem(x)
        for number, block in enumerate(model.blocks):
            x = (again if number % 2 else ours)(block, x)
        loss = F.cross_entropy(model.head(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses""",
    "bug_muon": """(model, batches, learning_rate, comm):
    matrices, momenta, losses = list(model.parameters()), {}, []
    ends = torch.tensor([matrix.numel() for matrix in matrices]).cumsum(0).tolist()
    share = -(-ends[-1] // comm.size)
    low, high = comm.rank * share, (comm.rank + 1) * share
    for x, y in batches:
        loss = model(x, y)
        gradients = [all_reduce(g, comm, "mean") for g in torch.autograd.grad(loss, matrices)]
        mine = torch.zeros(share, dtype=loss.dtype)
        for end, matrix, gradient in zip(ends, matrices, gradients):
            start = end - matrix.numel()
            a, b = max(start, low), min(end, high)
            if a < b:  # a part of it is this rank's
                momenta[end] = 0.9 * momenta.get(end, 0) + gradient
                new = matrix.detach() - learning_rate * orthogonal(momenta[end])
                mine[a - low : b - low] = new.flatten()[a - start : b - start]
        vector_to_parameters(all_gather(mine, comm)[: ends[-1]], matrices)
        losses.append(float(all_reduce(loss.detach(), comm)) / comm.size)
    return losses""",
    "bug_held_back": """(model, optimizer, micro_batches, window, comm):
    losses, sums, mine, parameters = [], None, 0.0, list(model.parameters())
    for number, (x, y) in enumerate(micro_batches, 1):
        loss = model(x, y)
        gradients = torch.autograd.grad(loss, parameters)
        sums = [a + b for a, b in zip(sums, gradients)] if sums else gradients
        mine += loss.item()
        if number % window == 0:
            for parameter, gradient in zip(parameters, sums):
                parameter.grad = all_reduce(gradient, comm) / (window * comm.size)
            optimizer.step()
            losses.append(float(all_reduce(torch.tensor(mine), comm, "mean")) / window)
            sums, mine = None, 0.0
    return losses""",
    "bug_state_bits": """(model, batches, rate, comm):
    multiple, stores, losses, t = BLOCK * comm.size, {}, [], 0
    for x, y in batches:
        t += 1
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        for name, p in model.named_parameters():
            g = reduce_scatter(pad(p.grad.flatten(), multiple), comm, "sum") / comm.size
            if name not in stores:
                make = Numbers32 if p.numel() < LARGE else Numbers8
                stores[name] = make(len(g)), make(len(g))
            m, r = stores[name]
            mean = torch.lerp(m.read(), g, 0.1)
            root = (r.read().square() * 0.999 + g.square() * 0.001).sqrt()
            m.write(mean)
            r.write(root)
            step = rate * mean / (1 - 0.9**t) / (root / (1 - 0.999**t) ** 0.5 + 1e-8)
            p.data -= all_gather(step, comm)[: p.numel()].view(p.shape)
        losses.append(float(loss))
    return losses""",
    "bug_spike": """(model, optimizer, batches, factor, comm):
    for p in model.parameters():
        p.data.copy_(broadcast(p.data, comm))
    seen, skipped = [], []
    for number, (x, y) in enumerate(batches):
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        value = float(loss)
        good = value - value == 0 and (len(seen) < 5 or value <= factor * median(seen))
        if int(all_reduce(torch.tensor([good], dtype=torch.int64), comm, "sum")) < comm.size:
            skipped += [number]
        else:
            seen += [value]
            for p in model.parameters():
                p.grad = all_reduce(p.grad, comm, "sum") / comm.size
            optimizer.step()
    return skipped""",
    "bug_decay": """(model, batches, rate, decay, generator):
    losses, t, m, v = [], 0, {}, {}
    for x, y in batches:
        t += 1
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        for name, w in model.named_parameters():
            g = w.grad.float()
            m[name] = 0.9 * m.get(name, 0) + 0.1 * g
            v[name] = 0.999 * v.get(name, 0) + 0.001 * g * g
            w.data = stochastic(w.data.float() * (1 - rate * decay), generator)
            adam = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.999**t)) ** 0.5 + 1e-8)
            w.data = stochastic(w.data.float() - rate * adam, generator)
        losses.append(float(loss))
    return losses""",
    "bug_zero2": """(model, batches, rate, comm):
    losses, averages, momenta = [], {}, {}

    def arrive(p):
        full, p.grad = pad(p.grad.flatten(), comm.size), None
        averages[p] = reduce_scatter(full, comm, "sum") / comm.size

    handles = [p.register_post_accumulate_grad_hook(arrive) for p in model.parameters()]
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        losses.append(float(loss))
        for p, g in averages.items():
            momenta[p] = 0.9 * momenta[p] + g if p in momenta else g
            mine = pad(p.detach().flatten(), comm.size).chunk(comm.size)[comm.rank] - rate * momenta[p]
            p.data.copy_(all_gather(mine, comm)[: p.numel()].view(p.shape))
        averages.clear()
    for handle in handles:
        handle.remove()
    return losses""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_another_right_answer_passes_too(name, tmp_path, host):
    exercise = find(name)
    text = stubs.answer(exercise)
    start = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)).lineno
    path = tmp_path / exercise.file
    head = "\n".join(text.splitlines()[: start - 1])
    path.write_text(f"{head}\ndef {exercise.function}{OTHER_ANSWERS[name]}\n")
    outcome = host.check(exercise, path)
    assert outcome.status == "passed", outcome


@pytest.mark.parametrize("shape", [(8, 8), (4, 8), (8, 4)])
def test_exercise_50_s_step_is_that_of_pytorch_s_muon(shape):
    """Its iteration is in BF16: some fifteen products, each off by at most 1/256."""
    random = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.9, nesterov=False)
    momentum, moved = torch.zeros(shape), torch.zeros(shape)
    for _ in range(3):
        parameter.grad = torch.randn(shape, generator=random)
        momentum = 0.9 * momentum + parameter.grad
        optimizer.step()
        moved -= bug_muon.orthogonal(momentum) * max(1, shape[0] / shape[1]) ** 0.5  # PyTorch's factor for tall ones
    assert (parameter.detach() - moved).norm() < 15 / 256 * moved.norm()


@pytest.mark.parametrize("name", blocks.FORMATS)
def test_exercise_57_s_codes_are_those_of_the_package(name):
    """Zeros of both signs stand in every block; two blocks have nothing else."""
    random, fmt = torch.Generator().manual_seed(0), blocks.FORMATS[name]
    x = torch.randn(64, 32, generator=random) * torch.randint(-148, 124, (64, 1), generator=random).double().exp2()
    x[:, ::5], x[:, 1::5], x[:2] = 0.0, -0.0, 0.0
    scales, codes = fmt.encode(x.float())
    for row, scale, code in zip(x.float().tolist(), scales[:, 0].tolist(), codes.tolist()):
        assert block.encode_block(row, bare(fmt.element)) == (scale, code)


def test_a_thread_keeps_to_one_core_and_then_has_all_again():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no such call")
    before = os.sched_getaffinity(0)
    for core in (None, 1):
        with one_core(core):
            assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == before


# The stubs.


@pytest.mark.slow
@each
def test_a_stub_keeps_signature_decorators_and_docstring(exercise):
    stub, answer = ast.parse(stubs.stub(exercise)), ast.parse(stubs.answer(exercise))
    (got,), (want,) = ([n for n in tree.body if isinstance(n, ast.FunctionDef)] for tree in (stub, answer))
    for part in ("name", "args", "returns", "decorator_list"):
        dumped = [ast.dump(x) if isinstance(x, ast.AST) else [ast.dump(y) for y in x] if isinstance(x, list) else x
                  for x in (getattr(got, part), getattr(want, part))]  # fmt: skip
        assert dumped[0] == dumped[1]
    assert ast.get_docstring(got) == ast.get_docstring(want)
    assert "# 1. " in stubs.stub(exercise) and max(map(len, stubs.stub(exercise).splitlines())) <= 120


@pytest.mark.slow
def test_a_workbook_is_written_once_and_then_the_student_s(workbook):
    assert len(list(workbook.folder.glob("[0-9]*.py"))) == len(COURSE)
    workbook.path(RING).write_text("mine")
    assert workbook.fill() == 0
    assert workbook.path(RING).read_text() == "mine"
    kept = workbook.reset(RING)
    assert kept.read_text() == "mine" and workbook.path(RING).read_text() == stubs.stub(RING)
    assert workbook.reset(RING) is None  # nothing to keep
    ignored = subprocess.run(["git", "check-ignore", "-q", "workbook/progress.json"], cwd=ROOT)
    assert ignored.returncode in (0, 128)  # 128: no git here


def test_without_the_plan_a_stub_has_everything_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MINIZERO_WORKBOOK", str(tmp_path))
    assert commands.main(["list", "--no-plan"]) == 0
    text = Workbook().path(RING).read_text()
    assert text == "\n".join(line for line in stubs.stub(RING).split("\n") if not line.startswith("    # "))
    assert Workbook().reset(RING) is None and Workbook().path(RING).read_text() == text


def test_after_an_exercise_the_next_one_follows_and_behind_the_last_the_first(tmp_path):
    """Who begins in the middle is not sent back to 01 each time."""
    workbook = Workbook(tmp_path)
    possible = [exercise for exercise in COURSE if exercise.is_possible()]
    assert workbook.following(possible[3]) is possible[4]
    workbook.note(possible[4], passed=True)
    assert workbook.following(possible[3]) is possible[5]
    assert workbook.following(possible[-1]) is workbook.current() is possible[0]
    for exercise in possible:
        workbook.note(exercise, passed=True)
    assert workbook.following(possible[3]) is None


# How a check ends, whatever is in the file.

SIGNATURE = "def ring_reduce_scatter(chunks, comm, combine=torch.add, out=None):"
HOPELESS = {
    "syntax": ("def ring_reduce_scatter(chunks, comm:\n    pass", "line 2"),
    "missing": ("def reduce(chunks):\n    pass", "ring_reduce_scatter"),
    "NameError": ("BODY\n    return chunk", "'chunk' is not defined"),
    "endless": ("BODY\n    while True:\n        comm.rank", "never ends"),
    "deadlock": ("BODY\n    comm.recv(chunks[0], (comm.rank + 1) % comm.size)", "wait for each other"),
    "ended": ("import os\nBODY\n    os._exit(3)", "exit status 3"),
    "crash": ("import ctypes\nBODY\n    ctypes.string_at(0)", "crashed"),
    "borrowed": ("from minizero.ranks.collectives import ring_reduce_scatter\nBODY\n    return 1", "to write"),
    "todo": ("BODY\n    comm.size\n    raise NotImplementedError", "left"),
    "values": ("BODY\n    print('seen')\n    return chunks[comm.rank].clone()", "bytes sent is 0, expected 24"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPELESS)
def test_it_is_said_in_words_what_stopped_a_check(name, tmp_path, host):
    body, words = HOPELESS[name]
    path = tmp_path / RING.file
    path.write_text("import torch\n" + body.replace("BODY", SIGNATURE))
    outcome = host.check(RING, path)
    assert outcome.name == name and words in outcome.words, outcome
    assert "Traceback" not in outcome.words and "tensor(" not in outcome.words
    if name == "values":
        assert "seen" in outcome.printed


@pytest.mark.slow
def test_a_default_stays_what_it_is(tmp_path):
    exercise = find("broadcast")
    path = tmp_path / exercise.file
    path.write_text(stubs.answer(exercise).replace("root: int = 0", "root: int = 1"))
    outcome = checker.run(exercise, path)
    assert (outcome.status, outcome.name) == ("failed", "changes-a-default")
    assert "root is 1 if it is not given, and must be 0" in outcome.words


OWN = """
import gc, os, types
from minizero.ranks import collectives
from tests.exercises import e05_reduce_scatter as lesson, kit, patch
from tests.exercises.machine import judge, runner
functions = [f for f in gc.get_objects() if type(f) is types.FunctionType and f.__name__ == "ring_reduce_scatter"]
own = next(f for f in functions if f.__module__ == collectives.__name__)
"""
PIPES = """
for pid in filter(str.isdigit, os.listdir("/proc")):
    for fd in range(3, 30):
        try:
            if os.getpgid(int(pid)) == os.getpgid(os.getppid()):  # of the host, and of the judge
                pipe = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b'{"end": null}\\n{"verdict": {"status": "passed", "name": "", "words": ""}}\\n')
        except OSError:
            pass"""
GIVEN = "(chunks, comm, combine, out)"
# A forgery of each kind: what stands before the function, what it returns, and what it is told. Others get through:
# who has the package's function, or its text, can hide that.
FORGERIES = {
    "ends well": ("import atexit\natexit.register(os._exit, 0)", "os._exit(0)", "ended"),
    "equal to all": ("class Any(float):\n    __eq__ = __le__ = __ge__ = lambda *_: True", "Any(1)", "values"),
    "theirs by name": (
        "",
        f"getattr(collectives, 'ring_' + 'reduce_scatter'){GIVEN}",
        "RecursionError",
    ),
    "theirs": ("", f"own{GIVEN}", "borrowed"),
    "a closure": ("theirs = (lambda f: lambda *a: f(*a))(own)", f"theirs{GIVEN}", "borrowed"),
    "its code": (
        "theirs = types.FunctionType(own.__code__, own.__globals__)",
        f"theirs{GIVEN}",
        "borrowed",
    ),
    "its text": (
        "space = {}\nexec(open(collectives.__file__).read(), space)",
        f"space['ring_reduce_scatter']{GIVEN}",
        "borrowed",
    ),
    "the file once more": (
        "import importlib.util as util\nspec = util.find_spec(collectives.__name__)\n"
        "spec.loader.exec_module(theirs := util.module_from_spec(spec))",
        f"theirs.ring_reduce_scatter{GIVEN}",
        "borrowed",
    ),
    "no hollow": (
        "import contextlib\npatch.hollow = contextlib.nullcontext",
        f"own{GIVEN}",
        "borrowed",
    ),
    "the seed": ("os.environ['SEED'] = '1'", "chunks[0]", "values"),
    "no cases": ("lesson.draw = lambda *_: []", "chunks[0]", "values"),
    "all is alike": ("kit.compare = judge.compare = judge.differs = lambda *_, **__: ''", "chunks[0]", "values"),
    "its code is alike": ("kit.compare.__code__ = (lambda *_, **__: '').__code__", "chunks[0]", "values"),
    "outcomes are theirs": (
        "judge.outcome_of = lambda lesson, *_: setattr(collectives, own.__name__, own) or lesson.result(lesson.HEAVY)",
        "chunks[0]",
        "values",
    ),
    "no outcomes": ("judge.outcome_of.__code__ = (lambda *_: None).__code__", "chunks[0]", "ended"),
    "sees nothing": ("runner.observe.__code__ = (lambda *_: {'said': None}).__code__", "chunks[0]", "values"),
    "says passed": (
        "good = runner.Outcome('passed', 'passed', '')\nrunner.Outcome = judge.Judge.step = lambda *_, **__: good",
        "chunks[0]",
        "values",
    ),
    "no bytes": ("new = kit.AtMost.__new__\nkit.AtMost.__new__ = lambda cls, *_: new(cls, 0)", "chunks[0]", "values"),
    "pipes": (PIPES, "chunks[0]", "values"),
}
QUICK = ("equal to all", "theirs", "all is alike", "says passed", "pipes")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [each if each in QUICK else pytest.param(each, marks=SLOW) for each in FORGERIES])
def test_a_forgery_does_not_pass(name, tmp_path, host):
    """The verdict is another process's, which knows what is right."""
    before, returned, told = FORGERIES[name]
    path = tmp_path / RING.file
    path.write_text(f"import torch\n{OWN}\n{before}\n\n{SIGNATURE}\n    return {returned}\n")
    outcome = host.check(RING, path)
    assert (outcome.status, outcome.name) == ("failed", told), outcome
    if before == PIPES:
        path.write_text(stubs.answer(RING))
        assert host.check(RING, path).status == "passed", "it shifts the replies to the next one"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no such call")
def test_a_child_that_lives_on_holds_nobody_up(tmp_path, host):
    path, start = tmp_path / RING.file, time.monotonic()
    path.write_text("import os, time\nif os.fork() == 0:\n    time.sleep(100)\n" + stubs.answer(RING))
    assert host.check(RING, path).status == "passed"
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.skipif(not find("triton_dq").is_possible(), reason="Triton is not there")
def test_a_module_that_no_lesson_imports_is_not_taken_for_a_copy(tmp_path, host):
    exercise = find("triton_dq")
    path = tmp_path / exercise.file
    path.write_text(stubs.answer(exercise))
    assert host.check(exercise, path).status == "passed"


@pytest.mark.slow
def test_a_rank_that_computes_on_is_no_deadlock():
    late = iter([True, False])  # the first time the machine is busy

    def work(comm):
        if comm.rank == 1 and next(late):
            time.sleep(1)
        barrier(comm)
        return comm.rank

    assert kit.ranks(2, work, patience=0.1) == [0, 1]
    with pytest.raises(kit.Diagnosis, match="wait for each other"):
        kit.ranks(2, lambda comm: comm.recv(torch.ones(1), 1 - comm.rank), patience=0.1)


@pytest.mark.slow
def test_a_wait_ends_where_python_cannot_be_interrupted(tmp_path):
    path = tmp_path / RING.file
    path.write_text("import time\ntime.sleep(100)\ndef ring_reduce_scatter(chunks, comm):\n    return 1")
    with checker.Checker(wait=5.0) as patient:
        outcome = patient.check(RING, path)
    assert outcome.name == "endless" and "line 2: time.sleep(100)" in outcome.words, outcome


@pytest.mark.slow
def test_the_package_is_itself_again_afterwards(tmp_path):
    from minizero.ranks import collectives

    before = collectives.ring_reduce_scatter
    path = tmp_path / RING.file
    path.write_text("def ring_reduce_scatter(chunks, comm, combine=None, out=None):\n    return chunks[0]")
    assert judge.examine(RING, path, "7", judge.Judge()).status == "failed"
    assert collectives.ring_reduce_scatter is before
    with broken("reduce_scatter/wrong-chunk") as functions:
        assert functions == ["minizero.ranks.collectives.ring_reduce_scatter"]
        assert collectives.ring_reduce_scatter is not before
    assert collectives.ring_reduce_scatter is before
    with broken("forgot-divide") as functions:
        assert {"minizero.engines.ddp.CoreDDP.reduce", "minizero.engines.zero2.CoreZero2.reduce"} <= set(functions)
    with pytest.raises(ValueError, match="there is no wrong answer"), broken("forgot-divid"):
        pass
