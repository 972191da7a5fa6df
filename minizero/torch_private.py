"""Every private name of PyTorch that we use, in one place: why, since when, what public call would replace it.

A private name may change with any release. "Since 2.1" means that the packages of PyTorch have it from 2.1 on, and
that 2.0 does not. "At least since 1.12" means that nobody has looked into an older package. minizero needs 2.11 or
newer, so it has all of them. A CI job tries the newest PyTorch, so that a change is seen here first. A test
holds that no other file has a private name, but for those in `IN_PLACE`. What we change for the whole process, in
PyTorch, Triton or Python, stands in `WHOLE_PROCESS`, and a test holds that it is complete.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

# Autograd.


def current_backward() -> int:
    """The number of the backward that runs in this thread, -1 if none does.

    Why: a backward that raised tells nobody; the next forward sees that none runs any more.
    Since 2.0. In its place: a public way to ask whether backward runs.
    """
    return torch._C._current_graph_task_id()


def will_write(node: torch.autograd.graph.Node) -> bool:
    """Will the backward that runs now run this node? False for a leaf whose gradient `torch.autograd.grad` returns.

    Why: a backward of some inputs only must not be taken for one of the parameters.
    Since 2.0. In its place: a public question for what a backward was asked.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def call_at_end_of_backward(call: Callable[[], None]) -> None:
    """Let autograd call `call` when the backward that runs now is over. To be called from a hook.

    Why: only autograd knows that no further gradient will come. DDP and FSDP of PyTorch use it.
    At least since 1.12. In its place: a public hook at the end of backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def as_plain_tensors() -> Any:
    """A context in which subclasses of Tensor are not asked about what is done with them.

    Why: the public `Tensor.__torch_function__` makes new tensors of the results, without what is noted on these.
    Since 1.13. In its place: a public context of the same kind.
    """
    return torch._C.DisableTorchFunctionSubclass()


def next_operation() -> int:
    """The number that autograd will give to the next operation of this thread.

    Why: an operation with a number from here on belongs to the unit whose forward begins now.
    Since 2.1. In its place: a public `grad_fn.sequence_number`.
    """
    return torch._C._autograd._get_sequence_nr()


def operation_of(tensor: torch.Tensor) -> int:
    """The number of the operation that made the tensor; -1 for a leaf.

    Why, since when, and in its place: as `next_operation`.
    """
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def operation_going_backwards() -> int:
    """The number of the operation whose backward runs now; -1 if none does.

    Why: what is born in backward is told by the line that it has in forward.
    Since 2.1. In its place: a public question for the node that runs, and its number.
    """
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def keeps_graph() -> bool:
    """Was the backward that is running called with retain_graph=True?

    Why: if so another backward may ask for the same results again.
    Since 2.5. In its place: a public property of the backward.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def gradient_hooks(leaf: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The user's hooks of `register_hook`, and of `register_post_accumulate_grad_hook`. Ours are marked `ours`.

    Why: a shard's gradient comes from a collective, so autograd does not call them.
    Since 2.1. In its place: a public call of them.
    """
    with torch._C.DisableTorchFunctionSubclass():  # an empty parameter (`Released`) answers each question in Python
        before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    of_before, of_after = (
        [hook for hook in (hooks or {}).values() if not hasattr(hook, "ours")] for hooks in (before, after)
    )
    return of_before, of_after


def hooks_of_saved_tensors() -> Any:
    """The pair of functions that `saved_tensors_hooks` has set around us, None if there is none.

    Why: a checkpoint gives its inputs to the checkpoint around it, as autograd would.
    Since 2.8. In its place: a public getter.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def counting_no_version() -> Any:
    """A context in which `detach` gives a tensor that shares the version counter of the first.

    Why: a result that is kept must notice later writes through its other names.
    Since 2.2. In its place: an option of `detach`.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


# Modes and operators.


def function_transform_is_active() -> bool:
    """Are we inside torch.func's grad, vmap or another of its transforms?

    Why: they cannot go through a second run of a function.
    Since 1.13. In its place: a public question of torch.func.
    """
    return torch._C._are_functorch_transforms_active()


def consists_of_others(operator: Any) -> bool:
    """Does the operator only call other operators, on the CPU too? (SiLU's backward does where it has no kernel.)

    Why: what it returns is born in those.
    Since 2.1. In its place: a public tag of such operators.
    """
    keys, has = torch._C.DispatchKey, operator.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(keys.CPU)


def operators_that_draw(kind: str) -> list[Any]:
    """The operators of PyTorch whose kernel for "CPU" or "CUDA" may draw random numbers.

    Why: ranks that are threads draw from states of their own.
    Since 2.0. In its place: a public list of an operator's kernels.
    """
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(kind):
        library, name = name.split("::")
        packet, _, overload = name.partition(".")
        if library == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            takes_one = any(argument.name == "generator" for argument in operator._schema.arguments)
            if takes_one or torch.Tag.nondeterministic_seeded in operator.tags:
                found.append(operator)
    return found


without_modes = _disable_current_modes
"""A context in which no TorchDispatchMode is active.

Why: modes watch a function's own operators, and the copy of a generator's state is none of them.
Since 2.0. In its place: a public context of the same name.
"""


@contextlib.contextmanager
def lent_kernels() -> Iterator[Callable[..., None]]:
    """Gives a function that registers a kernel of Python for one of PyTorch's operators; all end with the block.

    Why: an attention, or a cast of autocast, that C++ calls is seen by no mode in Python.
    Since 2.1. In its place: a public end of a `torch.library.Library`.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        yield library.impl
    finally:
        library._destroy()


def registered(key: str) -> set[str]:
    """The names of the operators that have a kernel for a dispatch key, such as "AutocastCUDA".

    Why: the operators for which autocast casts are listed nowhere else.
    Since 1.11. In its place: a public list of them.
    """
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


AFTER_AUTOCAST = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
"""The kernels that come after autocast's.

Why: where autocast leaves an operator alone, what comes next is called.
Since 1.12. In its place: a public way to call the next kernel.
"""

ATTENTION = {
    "math": torch.ops.aten._scaled_dot_product_attention_math,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
    "flash": torch.ops.aten._scaled_dot_product_flash_attention,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention,
}
"""PyTorch's ways to compute attention on a GPU.

Why: PyTorch's attention chooses one of them by the device, and a fake tensor has the CPU's.
Since 2.5. In its place: an option of it, which names a device.
"""


# A GPU's allocator.


@contextlib.contextmanager
def allocator_history() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """While it is entered: a function that returns what the current GPU's allocator has done, event by event.

    Why: `memory_allocated` says what is held between operators, and not what one takes inside itself.
    Since 2.1. In its place: a public recorder of allocations.
    """
    torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
    try:
        yield lambda: torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)


# Storages and modules.


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number for the memory of tensors, the same for all its views, also while that memory is empty.

    Why: `data_ptr()` is 0 for each empty storage.
    At least since 1.12. In its place: `UntypedStorage.__hash__` by identity.
    """
    return storage._cdata


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins: its memory's number, and the elements before it there.

    Why, since when, and in its place: as `storage_id`. A fake tensor has no `data_ptr()` at all.
    """
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset())


def weight_is_computed(module: nn.Module) -> bool:
    """Does torch.nn.utils.weight_norm or spectral_norm compute the module's weight before each forward?

    Why: autograd keeps that weight until backward, and stage 3 cannot free it.
    Since 1.8, as `compute_weight`. In its place: parametrizations, which can be asked.
    """
    return any(hasattr(hook, "compute_weight") for hook in module._forward_pre_hooks.values())


def is_compiled(module: nn.Module) -> bool:
    """Did `module.compile()` compile the module, with its hooks?

    Why: what is compiled must not hold units that come and go.
    Since 2.1, as `module.compile()`. In its place: a public property.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_inside(module: nn.Module) -> bool:
    """Is it what `torch.compile(module)` returned, around the plain module and inside its hooks?

    Why: as `is_compiled`.
    Since 2.0, as `torch.compile`. In its place: a public property.
    """
    return hasattr(module, "_orig_mod")


def not_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which `torch.compile` leaves as it is.

    Why: the public `torch.compiler.disable` loads the compiler when it decorates, which takes seconds.
    Since 2.1. In its place: that one, if it waited with the loading.
    """
    return torch._disable_dynamo(call)


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the function: `torch.compile` leaves it as it is, with all that it calls.

    Why: `not_compiled` loads the compiler at the first call, and takes a microsecond, where autograd calls once for
    each tensor that it saves.
    Since 2.7. In its place: as `not_compiled`.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where what calls it is compiled
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


BatchNorm = nn.modules.batchnorm._NormBase
"""The class of all norms with running statistics.

Why: they have no public base.
At least since 1.12. In its place: a public base.
"""


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
    "minizero/engines/any_model/guards/optimizers.py": "Two hooks around each step of every optimizer. They begin with "
    "`import minizero`, and leave an optimizer without shards alone. Without them: import only `flash`, `precision`.",
    "minizero/memory/recorder.py": "Seven functions that make or resize a storage without an operator, such as "
    "`UntypedStorage.resize_`, are wrapped. It begins with the first `Ledger` and does not end; between ledgers "
    "they only look for one. Without it: open no `Ledger`.",
    "minizero/interrupted.py": "`sys.excepthook` says one line at Ctrl-C. It begins when a command of ours, such as "
    "`python -m minizero.train`, begins to import, and does not end. Without it: `import minizero` in a program.",
    "minizero/recompute/replay.py": "A hook before the forward of every module, which ignores other threads. It lives "
    "during the first run of a checkpoint. Without it: `set_enabled(False)`.",
    "minizero/recompute/frame.py": "A hook after the forward of every module, which ignores other threads. It lives "
    "during the second run of a checkpoint. Without it: `set_enabled(False)`.",
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
