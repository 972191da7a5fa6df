"""A use that would train something else, or something wrong, or hang, is an error that says what to do."""

import copy
import dataclasses
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from minizero import DDP, GPT, RankFailed, World, Zero1, Zero2, Zero3, barrier
from tests.engines.test_any_model import slope, writing
from tests.support.helpers import SMALL, STAGES, exactly, relative_error, run, train
from tests.support.small_models import SHARDED, Blocks, on_ranks, refused, seeded, vectors, wrapped

# Modules that cannot be wrapped.


def linear(change):
    module = nn.Linear(2, 2)
    change(module)
    return module


def more(**options):
    parameter = nn.Parameter(torch.ones(2, **options), requires_grad=False)
    return linear(lambda module: module.register_parameter("more", parameter))


def sliced(*places):
    memory, module = torch.randn(8, 6), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for part, place in zip(module, places):
        part.weight = nn.Parameter(memory[place])
    return module


def embedded(kind=nn.Embedding, trains=True, **options):
    return nn.Sequential(kind(10, 4, **options).requires_grad_(trains), nn.Linear(4, 4))


ALL, MAX_NORM = slice(None), "0 has a max_norm: its forward writes in place"
SCRIPTED = torch.jit.script(nn.Linear(2, 2))  # by one thread: two at once may raise
UNWRAPPABLE = [
    (nn.ReLU, "no parameters that train"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameters that train"),
    (lambda: more(device="meta"), "more is on the meta device"),
    (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight is lazy, and has no shape yet"),
    (lambda: more(dtype=torch.complex64), "more is torch.complex64: keep real"),
    (lambda: more(dtype=torch.int64), "more is torch.int64: make it a buffer"),
    (lambda: linear(lambda m: m.register_buffer("row", m.weight.detach()[0])), "row lies in the memory of weight"),
    (
        lambda: linear(lambda m: m.weight.register_post_accumulate_grad_hook(print)),
        "a hook of register_post_accumulate_grad_hook on weight",
    ),
    (lambda: nn.Linear(2, 2).double(), "parameters must be float32, weight is torch.float64"),
    (lambda: nn.Sequential(SCRIPTED), "0 is a ScriptModule"),
    (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))), "0 is a SyncBatchNorm"),
    (lambda: sliced(ALL, ALL), "1.weight and 0.weight are two parameters in one memory"),
    (lambda: sliced(ALL, slice(3, 5)), "1.weight and 0.weight are two parameters in one memory"),
    (lambda: sliced(slice(0, 4), slice(3, 8)), "1.weight and 0.weight are two parameters in one memory"),
    (lambda: sliced((ALL, slice(4)), (ALL, slice(3, 6))), "1.weight and 0.weight are two parameters in one memory"),
    (lambda: embedded(sparse=True), "0 gives sparse gradients, shards are dense: sparse=False"),
    (lambda: embedded(nn.EmbeddingBag, sparse=True), "0 gives sparse gradients, shards are dense: sparse=False"),
    (lambda: embedded(max_norm=1.0), MAX_NORM),
    (lambda: embedded(nn.EmbeddingBag, max_norm=1.0), MAX_NORM),
    (lambda: World(1, "cpu").run(lambda comm: DDP(nn.Linear(2, 2), comm))[0].module, "weight is wrapped in DDP"),
]


WRAPPABLE = [
    (1, lambda: embedded(max_norm=1.0)),
    (2, lambda: embedded(trains=False, max_norm=1.0)),
    (2, lambda: embedded(trains=False, sparse=True)),
    (2, lambda: sliced(slice(0, 4), slice(4, 8))),
    (2, lambda: sliced((ALL, slice(3)), (ALL, slice(3, 6)))),
]


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_cannot_be_wrapped(stage):
    for make, words in UNWRAPPABLE:
        with pytest.raises(RankFailed) as failure:
            run(2, lambda comm, make=make: stage(make(), comm))
        assert type(failure.value.__cause__) is ValueError
        assert f"{stage.__name__}: " in str(failure.value) and words in str(failure.value)
    with pytest.raises(RankFailed, match="dtype must be"):
        run(1, lambda comm: stage(nn.Linear(2, 2), comm, dtype=torch.float64))
    for size, make in WRAPPABLE:
        run(size, lambda comm, make=make: stage(make(), comm))


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_another_rank_is_refused(stage):
    module = seeded(Blocks)()
    with pytest.raises(RankFailed, match=rf"{stage.__name__}: 0.0.0.weight is another rank's: .*deepcopy"):
        run(2, lambda comm: stage(nn.Sequential(module.blocks), comm))


def test_ranks_with_different_models_are_told_so():
    with pytest.raises(RankFailed, match="did the ranks build different models"):
        run(3, lambda comm: Zero1(GPT(dataclasses.replace(SMALL, width=64 if comm.rank == 1 else 32)), comm))


# Modules that were changed, moved, copied or read.


@on_ranks()
def test_what_would_be_silently_wrong_is_refused(model, comm):
    refused(type(model).__name__, model.half, lambda: copy.deepcopy(model))
    for whole in (model, model.module, model.module.out, list(model.parameters())):
        refused("gather_state_dict", functools.partial(pickle.dumps, whole))
    for outer in (model, nn.Sequential(model)):
        refused(f"{type(model).__name__}: initialise the module before wrapping", functools.partial(outer.apply, print))
    state = model.gather_state_dict()
    for change, message in (
        (lambda s: s.pop("out.bias"), "missing or unknown: out.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "missing or unknown: extra"),
        (lambda s: s.update({"out.bias": torch.zeros(2)}), r"out.bias \(2,\), here \(1,\)"),
    ):
        bad = dict(state)
        change(bad)
        refused(message, functools.partial(model.load_full_state_dict, bad), error=ValueError)


@on_ranks(
    [functools.partial(stage, dtype=dtype) for stage in STAGES for dtype in (None, torch.float16)],
    make=lambda: nn.Conv2d(2, 2, 2),
)
def test_a_move_to_where_it_is_changes_nothing_and_another_one_is_refused(model, comm):
    model.module.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    here = model.dtype or torch.float32
    for whole in (model, nn.Sequential(model)):
        for moved in (whole.to("cpu"), whole.cpu(), whole.to(here), whole.to(torch.empty(0, dtype=here))):
            assert moved is whole
    refused(
        f"{type(model).__name__}: (move or cast|cannot be shared)",
        lambda: model.to("meta"),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.to_empty(device="cpu"),
        model.double,
        model.share_memory,
    )


@on_ranks([Zero3])
def test_a_released_unit_cannot_be_used_by_accident(model, comm):
    weight = model.module.blocks[0][0].weight
    assert weight.untyped_storage().nbytes() == 0 and "Parameter" in repr(weight) and weight.numel() == 35
    refused(
        r"Zero3: blocks\.0\.0\.weight, of the unit blocks\.0, is empty",
        lambda: F.linear(vectors(0), weight),
        lambda: torch.zeros(8, 8).lerp_(weight, 0.5),
        lambda: copy.deepcopy(model.module.blocks),
        lambda: nn.init.ones_(weight),
        lambda: weight.data,
        lambda: weight.T,
        lambda: weight.double(),
        lambda: weight.to(dtype=torch.float16),
        lambda: setattr(weight, "data", torch.ones(8, 8)),
    )


@on_ranks(SHARDED)
def test_old_replicas_are_not_read_between_a_step_and_the_next_forward(model, comm):
    average = AveragedModel(seeded(Blocks)())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(vectors(0)).sum().backward()
    optimizer.step()
    for read in (copy.deepcopy, average.update_parameters, lambda module: module.out(vectors(0))):
        refused(rf"{type(model).__name__}: .*is empty.*gather_state_dict", functools.partial(read, model.module))
    model(vectors(0))
    model.load_full_state_dict(model.gather_state_dict())
    refused("is empty", lambda: copy.deepcopy(model.module))


def moved(model):
    shard = next(model.parameters())
    shard.data = shard.data.clone()  # as a moving average is swapped in


def parametrized(model):
    parametrize.register_parametrization(model.module.out, "weight", nn.PReLU())


CHANGES = {
    r"out\.weight.* after wrapping": lambda model: setattr(model.module.out, "weight", nn.Parameter(torch.ones(1, 7))),
    r"out\.parametrizations\.weight\.0\.weight.* after wrapping|out\.weight.* is empty": parametrized,
    r"blocks\.3\.weight.* after wrapping": lambda model: model.module.blocks.append(nn.Linear(7, 7)),
    r"out\.bias.* after wrapping": lambda model: setattr(model.module.out, "bias", None),
    "requires_grad changed": lambda model: next(model.parameters()).requires_grad_(False),
    "no longer lies in its unit's memory": moved,
}


@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_changed_after_wrapping_is_named(stage, words):
    @wrapped(stage)
    def _(model, comm):
        refused(f"{stage.__name__}: .*({words})", lambda: (CHANGES[words](model), model(vectors(0))))


# Loops.


@on_ranks(SHARDED)
def test_uses_that_would_train_something_else_are_refused(model, comm):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first, second = model(vectors(0)).sum(), model(vectors(1)).sum()
    first.backward()
    optimizer.step()
    refused("changed between its forward and its backward", second.backward)
    optimizer.zero_grad()
    with model.no_sync():
        model(vectors(0)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    refused("set_to_none=True", lambda: model(vectors(0)).sum().backward())
    model.module.out.bias.requires_grad_(False)
    refused("requires_grad changed in root: .* or use no_grad", lambda: model(vectors(0)))
    refused("before wrapping", lambda: model.requires_grad_(False))
    refused("norm_type", lambda: model.clip_grad_norm_(1.0, 0), error=ValueError)
    refused("model.no_sync", lambda: setattr(model, "require_backward_grad_sync", False))


@on_ranks([functools.partial(stage, group_by=lambda name, parameter: parameter.dim()) for stage in SHARDED])
def test_a_sum_of_no_sync_is_not_dropped_in_part(model, comm):
    with model.no_sync():
        model(vectors(0)).sum().backward()
    next(model.parameters()).grad = None
    refused("set_to_none=True", lambda: model(vectors(0)).sum().backward())


@pytest.mark.parametrize("stage", SHARDED)
def test_what_does_not_reach_the_shards_is_refused(stage):
    saved = []

    @wrapped(stage)
    def _(model, comm):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()  # some loops begin so, and it does nothing
        model(vectors(0)).sum().backward(inputs=list(model.parameters()))
        refused(f"{stage.__name__}: a step without a backward. Had it inputs=?", optimizer.step)
        model(vectors(0)).sum().backward()
        optimizer.step()
        refused(
            rf"{stage.__name__}: \S+ has no .grad, the shards have: .* itself",
            model.module.zero_grad,
            lambda: model.module.out.zero_grad(set_to_none=False),
            nn.Sequential(model).zero_grad,
            lambda: setattr(model.module.out.bias, "grad", None),
        )
        saved.extend([optimizer.state_dict()] if comm.rank == 0 else [])
        barrier(comm)
        optimizer.load_state_dict(saved[0])
        if comm.rank == 0:
            optimizer.step()
        else:
            refused("of rank 0 of 2, its shards are of rank 1 of 2: .*checkpoint", optimizer.step)


@on_ranks()
def test_what_no_sync_holds_back_is_neither_stepped_nor_clipped(model, comm):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(vectors(0)).sum().backward()
    with model.no_sync():
        model(vectors(0)).sum().backward()
    held = rf"{type(model).__name__}: no_sync\(\) holds the gradients back"
    refused(held, optimizer.step, lambda: model.clip_grad_norm_(1.0))
    model(vectors(0)).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()


# Optimizers. A shard is a piece of a flat buffer: it serves where every number is updated by itself.


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_built_before_wrapping_is_told_at_its_first_step(stage):
    def early(comm):
        module = seeded(Blocks)()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = stage(module, comm)
        model(vectors(0)).square().mean().backward()
        optimizer.step()
        return model.gather_state_dict()

    if stage is DDP:
        assert relative_error(run(2, early)[0], seeded(Blocks)().state_dict()) > 1e-4
    else:
        with pytest.raises(RankFailed, match=r"before the model was wrapped.*parameters\(\)"):
            run(2, early)


CLASSES = filter(inspect.isclass, vars(torch.optim).values())
OPTIMIZERS = [kind for kind in CLASSES if kind is not torch.optim.Optimizer]
WHOLE = {"LBFGS", "Adafactor", "Muon"}


@pytest.mark.accuracy
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_gives_ddps_bits_or_is_refused(kind):
    if kind is torch.optim.SparseAdam:
        pytest.skip("for sparse gradients only")
    if kind.__name__ not in WHOLE:
        exactly(*([rank[:2] for rank in run(2, train, stage, 2, optimizer=kind)] for stage in (DDP, Zero3)))
    else:

        @wrapped(Zero3, lambda: GPT(SMALL))
        def _(model, comm):
            with pytest.raises((RuntimeError, ValueError), match=f"{kind.__name__}.*(whole tensors|2D parameters)"):
                optimizer = kind(model.parameters())  # Muon itself wants matrices
                optimizer.step(lambda: None) if kind is torch.optim.LBFGS else optimizer.step()


@on_ranks([Zero1, Zero3])
def test_a_fused_step_that_one_rank_would_leave_out_is_refused(model, comm):
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    scaler.scale(model(vectors(0)).square().mean()).backward()
    refused("GradScaler lets a fused optimizer.*fused=False", lambda: scaler.step(optimizer))


class Foreign(torch.optim.AdamW):
    """It may do anything in `step`: only its user knows."""


@on_ranks([Zero1, Zero3, functools.partial(DDP, dtype=torch.bfloat16)])
def test_a_foreign_optimizer_is_asked_about_once(model, comm):
    optimizer = Foreign(model.parameters())
    refused(f"{type(model).__name__} gives Foreign flat shards.*elementwise = True", optimizer.step)
    optimizer.elementwise = True
    optimizer.step()


@on_ranks([DDP])
def test_any_optimizer_steps_whole_tensors(model, comm):
    Foreign(model.parameters()).step()
    torch.optim.LBFGS(model.parameters()).step(lambda: model(vectors(0)).square().mean())


@on_ranks([Zero1])
def test_one_optimizer_may_step_engines_that_are_sharded_over_other_ranks(model, comm):
    other = Zero3(seeded(Blocks)(), comm, sharding_factor=1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    (model(vectors(0)) + other(vectors(0))).sum().backward()
    optimizer.step()


# Single calls of (model, comm).


class LooksUp(nn.Linear):
    """Sparse gradients that no module announces."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return F.embedding(x, self.weight, sparse=True)


class Reentrant(Blocks):
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.blocks[2], self.out(x) + x, use_reentrant=True)
        return x


class Experts(nn.ModuleList):
    def forward(self, x, which):
        return F.relu(self[which](x))


class Mine(torch.optim.Adafactor):
    """What derives from a refused optimizer is refused, too."""


def backward_with_graph(model, comm):
    model(vectors(0)).sum().backward(create_graph=True)


def another_memory(model, comm):
    shards = list(model.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(shards).detach().clone(), shards)
    torch.optim.SGD(shards, lr=0.1).step()


def shifted_in_fp32(model, comm):
    model.module.blocks[1].register_buffer("shift", torch.ones(7))
    model.module.blocks[1].register_forward_pre_hook(lambda block, given: given[0] + block.shift)
    model(vectors(0))


def memory_swapped_in_forward(model, comm):
    def moves(module, _):
        module[2].weight.data = module[2].weight.data * 0.9

    model.module.blocks[1].register_forward_pre_hook(moves)
    model(vectors(0))


def types_differ_for_another_reason(model, comm):
    model.module.blocks[1].forward = lambda x: x @ torch.ones(7, 7)
    model(vectors(0))


def infinite_on_rank_1(model, comm):
    model(vectors(0) * (torch.inf if comm.rank else 1)).sum().backward()
    model.clip_grad_norm_(1.0, error_if_nonfinite=True)


def hook_on_a_parameter(model, comm):
    model.module.out.bias.register_post_accumulate_grad_hook(print)
    model(vectors(0))


def hook_and_penalty(model, comm):
    shards = list(model.parameters())
    shards[0].register_hook(lambda gradient: 2 * gradient)
    (model(vectors(0)).sum() + shards[0].square().sum()).backward()


def written_before_a_penalty(model, comm):
    with model.no_sync():
        model(vectors(0)).sum().backward()
        next(model.parameters()).grad.mul_(2)
        sum(p.square().sum() for p in model.parameters()).backward()


def around_the_model(model, comm):
    dictionary = nn.ModuleDict({"engine": model, "head": nn.Linear(2, 2)})
    around = dictionary if comm.rank else torch.compile(model, backend="eager")
    torch.optim.SGD(around.parameters(), lr=0.1).step()


AROUND = "not STAGE's shards.* from a module around the wrapped model.* from the .* of the STAGE itself"
TWO_LINEAR = {"make": lambda: Experts(nn.Linear(7, 7) for _ in "ab")}
REFUSED = [  # the call, its words, in which stages, how it is wrapped
    (lambda m, _: m(torch.tensor([3])).sum().backward(), "root: sparse .* use sparse=False", STAGES, {"make": LooksUp}),
    (backward_with_graph, "an average over ranks.* use torch.autograd.grad", STAGES[:3], {}),
    (backward_with_graph, "double backward.* use DDP, Zero1 or Zero2", [Zero3], {}),
    (
        lambda m, _: torch.func.grad(lambda x: m(x).sum())(vectors(0)),
        "double backward.* torch.func.* use DDP",
        [Zero3],
        {},
    ),
    (lambda m, _: slope(m, vectors(0), 0).backward(), "double backward.* use DDP, Zero1 or Zero2", [Zero3], {}),
    (another_memory, "STAGE: a shard no longer lies in its unit's memory", STAGES, {}),
    (memory_swapped_in_forward, r"STAGE: .*\.\d\.weight.* was given other memory", STAGES, {}),
    (
        lambda m, _: m(vectors(0)),
        r"STAGE: .*\.\d\.weight.*its FP32 master was not",
        STAGES,
        {"make": writing, "dtype": torch.bfloat16},
    ),
    (shifted_in_fp32, "STAGE: .*same dtype.*: cast blocks.1.shift", STAGES, {"dtype": torch.bfloat16}),
    (types_differ_for_another_reason, "^(?!.*buffers).*same dtype", [DDP, Zero3], {"dtype": torch.bfloat16}),
    (infinite_on_rank_1, "the norm over all ranks is non-finite", STAGES, {}),
    (hook_on_a_parameter, "hook on out.bias would see this rank's gradient", STAGES, {}),
    (hook_and_penalty, "a hook on a shard, and a loss that uses the shard", [Zero2], {}),
    (written_before_a_penalty, "was written to between backwards", [Zero1], {}),
    (lambda m, _: m(vectors(0)).sum().backward(), "use_reentrant=False", [Zero1], {"make": Reentrant}),
    (
        lambda m, comm: m(vectors(0), comm.rank),
        "label=[01].*name a module around them all in units=",
        [Zero3],
        TWO_LINEAR,
    ),
    (lambda m, _: Mine(m.parameters()).step(), "Mine needs whole tensors, STAGE gives it flat", [Zero3], {}),
    (around_the_model, AROUND, [Zero1, Zero3], {}),
]


@pytest.mark.parametrize(
    "stage, call, words, options", [(stage, *row[:2], row[3]) for row in REFUSED for stage in row[2]]
)
def test_a_call_is_refused_by_name(stage, call, words, options):
    error = {hook_on_a_parameter: ValueError}.get(call, RuntimeError)
    wrapped(stage, **options)(
        lambda *given: refused(words.replace("STAGE", stage.__name__), lambda: call(*given), error=error)
    )
