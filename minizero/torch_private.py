"""Every private name of PyTorch that we use, in one place. `REASONS` says why, since when, and what would replace it.

A private name may change with any release. "Since 2.1" means that the packages of PyTorch have it from 2.1 on, and
that 2.0 does not. "At least 1.12" means that nobody has looked into an older package. minizero needs 2.11 or
newer, so it has all of them. `make newest` tries the newest PyTorch, so that a change is seen here first. A test holds
that `REASONS` is complete, and that no other file has a private name, but for those in `IN_PLACE`. What we change for
the whole process, in PyTorch, Triton or Python, stands in `WHOLE_PROCESS`, and a test holds that it is complete.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

# Autograd.

current_backward = torch._C._current_graph_task_id  # the number of the backward in this thread, -1 if none runs
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # was it called with retain_graph=True?
# Autograd calls the function that it is given when the backward that runs now is over. To be called from a hook.
call_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
next_operation = torch._C._autograd._get_sequence_nr  # the number that this thread's next operation will get
as_plain_tensors = torch._C.DisableTorchFunctionSubclass  # a context in which no subclass of Tensor is asked


def will_write(node: torch.autograd.graph.Node) -> bool:
    """Will the backward that runs now run this node? False for a leaf whose gradient `torch.autograd.grad` returns."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def operation_of(tensor: torch.Tensor) -> int:
    """The number of the operation that made the tensor; -1 for a leaf."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def operation_going_backwards() -> int:
    """The number of the operation whose backward runs now; -1 if none does."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def gradient_hooks(leaf: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The user's hooks of `register_hook`, and of `register_post_accumulate_grad_hook`."""
    with torch._C.DisableTorchFunctionSubclass():  # an empty parameter (`Released`) answers each question in Python
        both = leaf._backward_hooks, leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    ours = "minizero.engines.", "minizero.memory."
    theirs = [[h for h in (hooks or {}).values() if not str(h.__module__).startswith(ours)] for hooks in both]
    return theirs[0], theirs[1]


def hooks_of_saved_tensors() -> Any:
    """The pair of functions that `saved_tensors_hooks` has set around us, None if there is none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def counting_no_version() -> Any:
    """A context in which `detach` gives a tensor that shares the version counter of the first."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


# Modes and operators.

function_transform_is_active = torch._C._are_functorch_transforms_active  # are we in torch.func's grad, vmap …?
outside_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack  # a context: in none of them
without_modes = _disable_current_modes  # a context in which no TorchDispatchMode is active
AFTER_AUTOCAST = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)  # the kernels after autocast's
ATTENTION = {  # PyTorch's ways to compute attention on a GPU
    "math": torch.ops.aten._scaled_dot_product_attention_math,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
    "flash": torch.ops.aten._scaled_dot_product_flash_attention,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention,
}


def consists_of_others(operator: Any) -> bool:
    """Does the operator only call other operators, on the CPU too? (SiLU's backward does where it has no kernel.)"""
    keys, has = torch._C.DispatchKey, operator.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(keys.CPU)


def registered(key: str) -> set[str]:
    """The names of the operators that have a kernel for a dispatch key, such as "AutocastCUDA"."""
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def operators_that_draw(kind: str) -> list[Any]:
    """The operators of PyTorch whose kernel for "CPU" or "CUDA" may draw random numbers."""
    found = []
    for name in registered(kind):
        library, name = name.split("::")
        packet, _, overload = name.partition(".")
        if library == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            takes_one = any(argument.name == "generator" for argument in operator._schema.arguments)
            if takes_one or torch.Tag.nondeterministic_seeded in operator.tags:
                found.append(operator)
    return found


@contextlib.contextmanager
def lent_kernels() -> Iterator[Callable[..., None]]:
    """Gives a function that registers a kernel of Python for one of PyTorch's operators; all end with the block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        yield library.impl
    finally:
        library._destroy()


# A GPU's allocator, storages and modules.


@contextlib.contextmanager
def allocator_history() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """While it is entered: a function that returns what the current GPU's allocator has done, event by event."""
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        yield lambda: torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number for the memory of tensors, the same for all its views, also while that memory is empty."""
    return storage._cdata


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins: its memory's number, and the elements before it there."""
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset())


BatchNorm = nn.modules.batchnorm._NormBase  # the class of all norms with running statistics
not_compiled: Callable[..., Any] = torch._disable_dynamo  # decorator: `torch.compile` leaves the function as it is


def is_no_worker(_: int) -> None:
    """Let this process, which works for a loader of ours, say that it does not: a user's loader asks."""
    torch.utils.data._utils.worker._worker_info = None


def weight_is_computed(module: nn.Module) -> bool:
    """Does torch.nn.utils.weight_norm or spectral_norm compute the module's weight before each forward?"""
    return any(hasattr(hook, "compute_weight") for hook in module._forward_pre_hooks.values())


def is_compiled(module: nn.Module) -> bool:
    """Did `module.compile()` compile the module, with its hooks?"""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_inside(module: nn.Module) -> bool:
    """Is it what `torch.compile(module)` returned, around the plain module and inside its hooks?"""
    return hasattr(module, "_orig_mod")


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the function: `torch.compile` leaves it as it is, with all that it calls."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where what calls it is compiled
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


REASONS = {
    "current_backward": "a backward that raised tells nobody; since 2.0; a question whether backward runs",
    "keeps_graph": "if so, another backward may ask for the same results again; since 2.5; a property of the backward",
    "call_at_end_of_backward": "only autograd knows that no gradient will come; at least 1.12; a hook at its end",
    "will_write": "a backward of inputs only is none of the parameters'; since 2.0; what a backward was asked for",
    "as_plain_tensors": "results keep what is noted on them; since 1.13; a context of that kind",
    "next_operation": "operations from here on belong to the unit that begins now; since 2.1; as `operation_of`",
    "operation_of": "it tells in whose forward a tensor was made; since 2.1; `grad_fn.sequence_number`",
    "operation_going_backwards": "what is born in backward has its line in forward; since 2.1; the node that runs",
    "gradient_hooks": "a shard's gradient is a collective's, so autograd calls no hook; since 2.1; a call of them",
    "hooks_of_saved_tensors": "a checkpoint gives its inputs to the one around it; since 2.8; a public getter",
    "counting_no_version": "what is kept must notice writes by its other names; since 2.2; an option of `detach`",
    "function_transform_is_active": "they cannot go through a second run; since 1.13; a question of torch.func",
    "outside_transforms": "a gather is the engine's, and no part of the function; since 2.1; a context of torch.func",
    "without_modes": "a copy of a generator's state is no operator of the user's; since 2.0; a context of that name",
    "AFTER_AUTOCAST": "if autocast leaves an operator alone, these come next; since 1.12; a call of the next kernel",
    "ATTENTION": "PyTorch chooses one by the device, and a fake tensor has the CPU's; since 2.5; an option for it",
    "consists_of_others": "what such an operator returns is born in the others; since 2.1; a tag of such operators",
    "registered": "what autocast casts is listed nowhere else; since 1.11; a list of an operator's kernels",
    "operators_that_draw": "ranks that are threads draw from states of their own; since 2.0; as `registered`",
    "lent_kernels": "no mode in Python sees an operator that C++ calls; since 2.1; an end of `torch.library.Library`",
    "allocator_history": "`memory_allocated` does not say what an operator takes inside itself; since 2.1; a recorder",
    "storage_id": "`data_ptr()` is 0 for each empty storage; at least 1.12; `UntypedStorage.__hash__` by identity",
    "place": "as `storage_id`, and a fake tensor has no `data_ptr()` at all; at least 1.12; as `storage_id`",
    "weight_is_computed": "autograd keeps that weight, and stage 3 cannot free it; since 1.8; parametrizations",
    "BatchNorm": "these norms have no public base; at least 1.12; a public base",
    "is_no_worker": "in a worker batches are put into shared memory; since 1.2; an option of `DataLoader`",
    "not_compiled": "`torch.compiler.disable` loads the compiler at once, for seconds; since 2.1; that, if it waited",
    "is_compiled": "what is compiled must not hold units that come and go; since 2.1; a property",
    "is_compiled_inside": "as `is_compiled`; since 2.0; a property",
    "never_compiled": "`not_compiled` takes 1 µs for each tensor that autograd saves; since 2.7; as `not_compiled`",
}
"""Of each name above: why we need it; since which PyTorch; what we would take instead, if it were public."""


IN_PLACE = {
    "_version": "a tensor's count of in-place writes, as autograd's error texts name it; since 0.4",
    "_base": "the tensor that a view is a view of; since 0.4",
    "_indices": "of a sparse tensor that is not coalesced; `indices` refuses those; since 0.4",
    "_parameters": "a module's own dict, in which a parameter is found again by its name; since 0.1",
    "_buffers": "a module's own dict, which recompute lends and takes back; since 0.1",
    "_schema": "an operator's arguments and results, and which of them are views or written; since 1.13",
    "_op": "an operator without the Python call around it, which takes 1 µs; since 1.13",
    "_python_dispatch": "the module of TorchDispatchMode, whose documentation imports it from there; since 1.13",
    "_pytree": "the module that goes through nested tuples, lists and dicts; since 1.8",
    "_dispatch_has_kernel_for_dispatch_key": "as `consists_of_others`, in `precision`, which does not import minizero",
    "_are_functorch_transforms_active": "as `function_transform_is_active`, in `flash`, which does not import minizero",
    "_functorch": "the module of is_legacy_batchedtensor: autograd batches so, too; since 2.0",
    "_local_scalar_dense": "an operator of PyTorch's own: a tensor's one number is read; since 0.4",
    "_from_config": "of transformers: builds a model in the dtype of its configuration; since 4.0",
    "_subclasses": "the module of fake tensors, which loads slowly, so only who needs it does",
    "_grouped_mm": "an operator of PyTorch's own, which mixtures of experts call; since 2.8",
    "_getframe": "Python's own: the frame that runs, as `inspect.currentframe` gives it, without an import",
    "_C": "the module of those",
}
"""Names that stand in other files: a function around an attribute would be called for each operator or tensor."""


WHOLE_PROCESS = {
    "minizero/engines/any_model/steps.py": "Two hooks around each step of every optimizer. They begin with "
    "`import minizero`, and leave an optimizer without shards alone. Without them: import only `flash`, `precision`.",
    "minizero/memory/recorder.py": "Seven functions that make or resize a storage without an operator, such as "
    "`UntypedStorage.resize_`, are wrapped. It begins with the first `Ledger` and does not end; between ledgers "
    "they only look for one. Without it: open no `Ledger`.",
    "minizero/interrupted.py": "`sys.excepthook` says one line at Ctrl-C. It begins when a command of ours, such as "
    "`python -m minizero.train`, begins to import, and does not end. Without it: `import minizero` in a program.",
    "minizero/recompute/replay.py": "A hook before the forward of every module, which ignores other threads. It lives "
    "during the first run of a checkpoint. Without it: `set_enabled(False)`.",
    "minizero/recompute/frame.py": "A hook after the forward of every module, which ignores other threads. It lives "
    "during the second run of a checkpoint. If a module raises in another thread as it comes or goes, PyTorch may say "
    "`OrderedDict mutated during iteration` in place of that error. Without it: `set_enabled(False)`.",
    "minizero/engines/timeline.py": "Methods of an engine are wrapped. It lives while a timeline records. Without it: "
    "record none.",
    "minizero/torch_private.py": "`get_worker_info` says None in the processes that an X-ray starts for the rows of "
    "its table. It ends with these. Without it: run no X-ray.",
    "minizero/xray/places.py": "Methods by which tensors move and loaders begin, autocast, and functions of torch.cuda "
    "and of torch.distributed have others in their place, which ask for the thread. It lives while an X-ray builds a "
    "model or runs a step. Without it: run no X-ray.",
    "minizero/xray/answers.py": "Classes such as `torch.cuda.Event`, as in `places.py`, for the user's code alone.",
    "minizero/xray/fake.py": "What a fake tensor says of its device, checks of distributions, a log of PyTorch's, a "
    "function of transformers. It lives while an X-ray runs a step. Without it: run no X-ray.",
    "minizero/xray/__main__.py": "`sys.argv`, while the command imports the user's file.",
    "minizero/xray/case.py": "A hook before each step of every optimizer, which ignores other threads. It lives while "
    "an X-ray runs a step. Without it: run no X-ray.",
    "minizero/ranks/world.py": "A call at the program's end, which waits for the threads of a `World`. It begins with "
    "`import minizero`, and does nothing without such threads. Without it: import `flash` and `precision` only.",
    "minizero/ranks/random_numbers.py": "Around the kernels of operators that draw is a function, and the default "
    "generators that torch's functions ask have stand-ins. It begins with the first `World.run` and does not end; a "
    "thread that is no rank only waits for those that draw. Without it: make the ranks processes, by torchrun.",
    "minizero/ranks/comm.py": "A call at the program's end, which closes a communicator. It begins with "
    "`Comm.from_process_group`. Without it: make the ranks threads, by `World`.",
    "flash/__init__.py": "The environment gets TRITON_INTERPRET=1. It begins with `import flash`, if there is no GPU "
    "and Triton is not imported. Without it: give the variable a value, or import Triton first.",
    "flash/launch.py": "The interpreter of Triton before 3.7 lets an array of one element be an index, which NumPy 2.4 "
    "asks for. It begins with the first kernel. Without it: a newer Triton, or backend='tiled'.",
}
"""Files that change PyTorch, Triton or Python for the whole process: what, from when to when, how to be without it."""
