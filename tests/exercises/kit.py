"""What the checks are made of. A check says in words what is wrong: it raises a `Diagnosis`."""

import contextlib
import copy
import math
import numbers
import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from minizero.memory.operators import Watcher
from minizero.ranks.errors import CollectiveMismatch, CommTimeout, RankFailed
from minizero.ranks.world import World

PATIENCE = 3.0  # seconds that a rank waits for another, if all of them wait
BUSY_PATIENCE = 60.0  # if one still computes, on a busy machine


class Diagnosis(Exception):
    """What is wrong with an answer. name: the mistake's own, by which the tests know it; words: for the student."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(words)
        self.name, self.words = name, " ".join(words.split())


class Wrong(NamedTuple):
    """An answer that students really give, as edits of the reference: pairs of old and new text.

    words: what is said of an answer that does the same; empty if it is `fail` that names and says it.
    """

    name: str
    words: str
    edits: tuple[tuple[str, str], ...]


def wrong(name: str, words: str, *edits: tuple[str, str]) -> Wrong:
    return Wrong(name, words, edits)


def fail(name: str, words: str) -> NoReturn:
    raise Diagnosis(name, words)


def ranks(size: int, fn: Callable[..., Any], *args: Any, patience: float = 0.0) -> list[Any]:
    """`fn(comm, *args)` on `size` ranks. A `Diagnosis` says what goes wrong between them. patience: else PATIENCE."""
    patience = patience or PATIENCE

    def on_rank(comm: Any) -> tuple[Any, int]:
        with unchanged(OF_A_THREAD), contextlib.ExitStack() as stack:
            for mode in ELSEWHERE:
                stack.enter_context(mode())
            return fn(comm, *args), torch_state()

    try:
        pairs = World(size, device="cpu", timeout=patience).run(on_rank)
        STATES.update({f"the state of rank {rank}'s random numbers": state for rank, (_, state) in enumerate(pairs)})
        return [result for result, _ in pairs]
    except RankFailed as failure:
        cause = failure.__cause__ or failure
        text = str(cause)
        if isinstance(cause, CommTimeout) and "was computing" in str(failure) and patience < BUSY_PATIENCE:
            return ranks(size, fn, *args, patience=BUSY_PATIENCE)
        if isinstance(cause, CommTimeout) or "returned while" in text:
            raise Diagnosis(
                "deadlock",
                f"The ranks wait for each other, and none can go on: {text}. Does every send meet a receive on "
                "the other side, in the same step, and do all ranks take the same number of steps?",
            ) from cause
        if isinstance(cause, CollectiveMismatch):
            raise Diagnosis("mismatch", f"Two ranks do different things: {text}.") from cause
        raise cause from None


class AtMost(float):
    """A number, of which less is right as well, and up to `most` times as much. least: of a peak, this must be."""

    def __new__(cls, number: float, most: float = 1.5, least: float = 0.0) -> "AtMost":
        self = super().__new__(cls, number)
        self.bounds = most, least
        return self

    bounds: tuple[float, float]


Tolerance = float | dict[torch.dtype, float]


def compare(got: Any, want: Any, tolerance: Tolerance = 0.0, what: str = "The result") -> str:
    """Where `got` differs from `want`, in words; "" if it does not. A result is a tensor, a number, a dict, a list, …

    NaN equals NaN only. Without a tolerance, -0 is not 0. A tolerance is relative to the largest value. There may
    be one for each dtype; a number counts as FP64.
    """
    if isinstance(want, torch.Tensor):
        return _compare_tensors(got, want, _of(tolerance, want.dtype), what)
    if hasattr(want, "_asdict"):
        got, want = getattr(got, "_asdict", lambda: got)(), want._asdict()
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple):
            return f"{what} is {_brief(got)}, expected {len(want)} values"
        got, want = ({f"place {i}": value for i, value in enumerate(values)} for values in (got, want))
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{what} is {_brief(got)}, expected {', '.join(map(str, want))}"
        each = (compare(got[k], want[k], tolerance, f"{what}, {k}" if k else what) for k in want if k in got)
        missing, more = want.keys() - got.keys(), got.keys() - want.keys()
        lengths = f"{what} has {len(got)} values, expected {len(want)}" if missing or more else ""
        return next(filter(None, each), lengths)
    if isinstance(want, AtMost):
        most, least = want.bounds
        right = got <= most * want and (not least or least * want <= got)
        return f"{what} is {_brief(got)}, expected about {want:g}, or less" if not right else ""
    if type(want) in (int, float):
        right = (
            isinstance(got, numbers.Real) and type(got) is not bool and _equal(float(got), float(want), _of(tolerance))
        )
        right = right and (type(want) is float or got == want)
    else:
        right = type(got) is type(want) and got == want
    if not right and isinstance(want, str) and want.endswith("Error"):
        return f"{what}: a {want} should be raised, and is not"
    return "" if right else f"{what} is {_brief(got)}, expected {'None' if want is None else _brief(want)}"


def _of(tolerance: Tolerance, dtype: torch.dtype = torch.float64) -> float:
    return tolerance if isinstance(tolerance, float) else tolerance.get(dtype, 0.0)


def _compare_tensors(got: Any, want: torch.Tensor, tolerance: float, what: str) -> str:
    if not isinstance(got, torch.Tensor):
        return f"{what} is {_brief(got)}, expected a tensor"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{what} has shape {tuple(got.shape)} of {got.dtype}, expected {tuple(want.shape)} of {want.dtype}"
    needs = f"{what} requires {'a' if got.requires_grad else 'no'} gradient, expected the other"
    needs = needs if got.requires_grad != want.requires_grad else ""
    got, want = got.detach(), want.detach()
    finer = want.dtype == torch.float64 and int((want.float() != want).sum())
    if tolerance and finer > 8 and got.equal(got.float().double()):
        return f"{what} is of float64, and its numbers have the digits of float32"
    if want.is_floating_point():
        right = (got == want) & (got.signbit() == want.signbit()) | got.isnan() & want.isnan()
    else:
        right = got == want
    if tolerance:
        finite = want[want.isfinite()].double().abs()
        bound = tolerance * (finite.amax().item() if finite.numel() else 0.0)
        right |= (got.double() - want.double()).abs() <= bound
    if right.all():
        return needs
    place = int((~right).reshape(-1).byte().argmax())
    one, other = _brief(got.reshape(-1)[place].item()), _brief(want.reshape(-1)[place].item())
    words = f"{int((~right).sum())} of {want.numel()} values are wrong, the first at place {place}"
    return f"{what}: {words}: {one}, expected {other}" if want.numel() > 1 else f"{what} is {one}, expected {other}"


def _equal(got: float, want: float, tolerance: float) -> bool:
    if math.isnan(want) or math.isinf(want) or not tolerance:
        return got == want and math.copysign(1, got) == math.copysign(1, want) or math.isnan(got) and math.isnan(want)
    return abs(got - want) <= tolerance * abs(want)


def _brief(value: Any) -> str:
    if value is None:
        return "None: is there a return?"
    if isinstance(value, dict):
        return f"{len(value)} values"
    if value == "":
        return "an empty text"
    text = str(value) if not isinstance(value, torch.Tensor) else f"a tensor of shape {tuple(value.shape)}"
    return text if len(text) <= 120 else f"{text[:117]} …"


def value_or_error(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the function returns; or the name of a ValueError that it raises, where that is what it should do."""
    try:
        return function(*args, **options)
    except ValueError as error:
        return type(error).__name__


PICKS = {"index", "index_select", "gather", "embedding"}  # they read what they give, and not all that they are given


LENT: list[tuple[torch.nn.Module, Any]] = []  # the models that an answer was given in a case, as they were
STATES: dict[str, int] = {}  # of the ranks' random numbers in a case, at their end
RETURNED: list[tuple[torch.Tensor, torch.Tensor]] = []  # what a callback returned in a case, and a copy


def lent(model: Any) -> Any:
    """A copy to train, of which one module is in eval mode."""
    model = copy.deepcopy(model)
    [*model.modules()][:2][-1].eval()
    LENT.append((model, _hung(model)))
    return model


def _hung(model: torch.nn.Module) -> Any:
    """Of each module and each parameter the names of its attributes; of a module, too, whether it trains."""
    return [({*vars(x)}, getattr(x, "training", None)) for x in (*model.modules(), *model.parameters())]


def returned(tensor: torch.Tensor) -> torch.Tensor:
    """What a callback gives an answer, which may not write into it. It lives as long as the case."""
    RETURNED.append((tensor, tensor.detach().clone()))
    return tensor


# What a call leaves as it is, with a function that says how it is: of a thread, and of the process.
OF_A_THREAD: dict[str, Callable[[], Any]] = {
    "torch's grad mode": torch.is_grad_enabled,
    "torch's inference mode": torch.is_inference_mode_enabled,
    "torch's default device": torch.get_default_device,
    "torch's autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "whether torch flushes subnormal numbers to 0": lambda: torch.full((1,), 1e-40, device="cpu").mul(0.5).item(),
}
MODES = OF_A_THREAD | {
    "torch's default dtype": torch.get_default_dtype,
    "whether torch's algorithms are deterministic": torch.get_deterministic_debug_mode,
    "autograd's anomaly mode": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    "the number of torch's threads": torch.get_num_threads,
    "the precision of torch's products": torch.get_float32_matmul_precision,
    "whether torch uses oneDNN": lambda: torch.backends.mkldnn.enabled,
    "how NumPy treats errors": np.geterr,
    "Python's limit of recursion": sys.getrecursionlimit,
    "the current folder": os.getcwd,
}
SET_BY_IMPORTS: dict[str, Callable[[], Any]] = {  # such as that of torch._dynamo, which some calls of PyTorch import
    "os.environ": lambda: dict(os.environ),
    "the filters of warnings": lambda: list(warnings.filters),
}
HANGS = "the train mode of a module, or what hangs on it or on a parameter,"
IN_A_CALL = {
    **MODES,
    **SET_BY_IMPORTS,
    HANGS: lambda: [None for model, was in LENT if was != _hung(model)],
    "what a callback returned": lambda: [None for tensor, was in RETURNED if compare(tensor.detach(), was)],
}


@contextlib.contextmanager
def unchanged(modes: dict[str, Callable[[], Any]]) -> Iterator[None]:
    """A `Diagnosis` if the block leaves one of them as another one."""
    before, modules = {what: state() for what, state in modes.items()}, len(sys.modules)
    yield
    excused = SET_BY_IMPORTS if len(sys.modules) > modules else {}
    if changed := [what for what, state in modes.items() if state() != before[what] and what not in excused]:
        torch.set_grad_enabled(before["torch's grad mode"])
        torch.set_default_dtype(before.get("torch's default dtype", torch.get_default_dtype()))
        fail("leaves-a-mode", f"After the call {changed[0]} is another one than before.")


MAKERS = {torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn, torch.eye, torch.linspace}
MAKERS |= {torch.tensor, torch.arange}
ELSEWHERE: list[Callable[[], TorchFunctionMode]] = []  # the mode of `elsewhere`, which each rank enters for itself


class OnMeta(TorchFunctionMode):
    """What the lines of a file make without a device is on `meta`. Numbers, and what may be an index, stay."""

    def __init__(self, file: str, lines: set[int]) -> None:
        self.file, self.lines = file, lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, line = func(*args, **(kwargs or {})), sys._getframe(1)
        if func not in MAKERS or (kwargs or {}).get("device") is not None or line.f_code.co_filename != self.file:
            return made
        if not made.dim() or made.dtype in (torch.int64, torch.int32):
            return made
        self.lines.add(line.f_lineno)
        return made.to("meta")


@contextlib.contextmanager
def elsewhere(file: str) -> Iterator[set[int]]:
    """Inside, each rank is on another device than the one that a tensor gets by default. Yields the lines that do it.

    The ranks' own device is the CPU, and `meta` is in place of the default.
    """
    lines: set[int] = set()
    ELSEWHERE.append(lambda: OnMeta(file, lines))
    try:
        with ELSEWHERE[0]():
            yield lines
    finally:
        ELSEWHERE.clear()


def seed_all() -> None:
    """The global generators of Python, NumPy and PyTorch, with a number that no answer chooses."""
    random.seed(5_881_263)
    np.random.seed(5_881_263)
    torch.default_generator.manual_seed(5_881_263)  # without CUDA's, which takes long
    STATES.clear()


def random_states() -> dict[str, int]:
    """A number for the state of each global generator. Who draws or seeds leaves another one."""
    numpy: Any = np.random.get_state()  # the numbers, and how many are used
    numpy = zlib.crc32(numpy[1].tobytes(), numpy[2])
    states = {"Python's": hash(random.getstate()[1]), "NumPy's": numpy, "PyTorch's": torch_state()}
    return {f"the state of {whose} random numbers": state for whose, state in states.items()}


def torch_state() -> int:
    """Of the generator that this thread draws from: each rank has its own."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())


class Work(Watcher):
    """How many numbers the operators read and write in all. Views cost nothing."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(given.alias_info and not given.alias_info.is_write for given in func._schema.returns):
            read = () if func.__name__.split(".")[0] in PICKS else args
            self.numbers += sum(x.numel() for x in tree_leaves([read, made]) if isinstance(x, torch.Tensor))
        return made


def observed(
    function: Callable[..., Any], *given: Any, most: float = 1.1, slack: float = 0, work: float = 4, meta: bool
) -> dict[str, Any]:
    """All that a call does. An exercise says only what it does not promise, and the package's function what is right.

    given: the arguments, of which tensors may require gradients. most: how many times the package's peak may be
    needed, and `slack` bytes more. work: how many times the numbers that its operators read and write. meta: whether
    the function runs without numbers, too, where a tensor made on the wrong device is seen. Not in the first cases: it
    loads torch._dynamo, for a second.
    """
    from minizero.memory import Ledger

    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    with Work() as done:
        first = function(*given)
    with Ledger() as ledger:
        got = function(*given)
    outputs = [x for x in tree_leaves(got) if isinstance(x, torch.Tensor)]
    inputs, sums = [x for x in tensors if x.requires_grad], [x.sum() for x in outputs if x.requires_grad]
    seen = {
        "the result": tree_map_only(torch.Tensor, torch.clone, got),
        "what was given, afterwards": tensors,
        "writes into what was given": [x._version for x in tensors],
        "memory of the result that an earlier one has, too": len(_storages(got) & _storages(first) - _storages(given)),
        "the gradients that arrive": torch.autograd.grad(sums, inputs, allow_unused=True) if inputs and sums else None,
        "bytes at the peak": AtMost(ledger.peak["total"] + slack, most, 0.02),
        "numbers read and written": AtMost(done.numbers + 50, work),
    }
    return seen | ({"the device, if what is given is on another": _placed(function, given, outputs)} if meta else {})


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.numel()}


def _placed(function: Callable[..., Any], given: Any, outputs: Any) -> list[str]:
    """Of the results for tensors on `meta`. A function that asks for a number there is not judged."""
    try:
        made = function(*(x.detach().to("meta") if isinstance(x, torch.Tensor) else x for x in given))
    except Exception as error:
        if "device" in str(error):
            raise
        return ["meta"] * len(outputs)
    return [str(x.device) for x in tree_leaves(made) if isinstance(x, torch.Tensor)]


def guard_unfold(function: Callable[..., Any]) -> None:
    """Make the `unfold` that the answer calls refuse a split that would never end."""
    unfold = function.__globals__.get("unfold")
    if unfold is None or unfold.__name__ == "guarded":
        return

    def guarded(stages: Any, split: Callable[..., int]) -> Any:
        def checked(i: int, end: int, kept: list[int]) -> int:
            answer = split(i, end, kept)
            if not i < answer < end:
                fail(
                    "out-of-range",
                    f"With the input of stage {i} kept and stages {i} … {end - 1} to go backward, the next input "
                    f"to keep was said to be that of stage {answer}: it must lie from {i + 1} to {end - 1}.",
                )
            return answer

        return unfold(stages, checked)

    function.__globals__["unfold"] = guarded
