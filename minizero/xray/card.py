"""As on a card: what a step makes and keeps on a GPU of NVIDIA, while its fake tensors stay on the CPU.

Four things differ from a CPU. Each is PyTorch's own code for CUDA, asked for on fake tensors of the CPU:

attention   PyTorch chooses a kernel by dtype, heads, mask and card (`backend`), and each keeps other tensors
dropout     keeps a byte for each number; RMSNorm keeps its input, and numbers for each row
autocast    torch.autocast("cuda") casts for other operators than the CPU's (`rules`)
scratch     what an operator takes while it runs (`SCRATCH`), and what cuBLAS keeps for good (`workspace`)

What results is the bytes that a step asks the card's allocator for. Ten models were held against an H200 (torch 2.11):
nine are right within a kilobyte. The tenth brings a mask of ones, which a real step drops, and a fake one cannot.

Sources, in PyTorch: sdp_utils.cpp, attention.cpp, attention_backward.cu, autocast_mode.h, Reduce.cuh, SoftMax.cu,
EmbeddingBackwardKernel.cu, CublasHandlePool.cpp.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from flash.gpus import GIB, GPUS, Gpu
from minizero import torch_private
from minizero.memory.operators import Watcher
from minizero.memory.recorder import current_recorder
from minizero.torch_private import AFTER_AUTOCAST, ATTENTION
from minizero.xray.fake import HALVES
from minizero.xray.places import CARD, having, here, lent, place_of

aten = torch.ops.aten
MIB = 2**20
SINCE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)  # see `backend`
NO_NAME = "nvidia geforce tesla quadro amd instinct graphics generation gpu hbm2 hbm2e hbm3"


def words_of(name: str) -> set[str]:
    """What a card's name says, whoever writes it: "NVIDIA A100-SXM4-40GB" is a100, sxm and 40gb."""
    words = re.sub(r"(?<=sxm)\d|[-_]", " ", name.lower()).replace("rtx", "rtx ").replace("0ti", "0 ti").split()
    return {*words} - {*NO_NAME.split()}


def card_of(name: str) -> str:
    """The product that a name means: h200, a100, 4090, Tesla T4. `ValueError` if none, or several kinds."""
    wanted = words_of(name)
    cards = {each: words_of(each) | {f"{gpu.memory / GIB:.0f}gb"} for each, gpu in GPUS.items() if gpu.threads}
    found = [product for product, words in cards.items() if wanted and wanted <= words]
    if len({GPUS[product].kind for product in found}) > 1:
        raise ValueError(f"{name!r} may be {', '.join(found)}: say which")
    if not found:
        raise ValueError(
            f"no card {name!r} is known: use one of {', '.join(cards)}, which may be "
            "shortened: one of the same generation, and the memory of yours, as in --card t4 --fit 8GiB"
        )
    return found[-1]  # of several sizes the largest


def workspace(card: str) -> Tensor:
    """What cuBLAS keeps for the threads of forward and of backward, and cuBLASLt."""
    size = 2 * (32 * MIB if GPUS[card].capability == (9, 0) else 8 * MIB + 128 * 1024) + MIB
    with having(making=CARD):
        return torch.empty(size, dtype=torch.uint8)


def backend(card: Gpu, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, gqa: bool) -> str:
    """PyTorch's choice, in its order. q: (batch, heads, queries, d); gqa: may several heads share keys?

    Since 2.14 "efficient" takes grouped heads, each kernel takes one head of keys without being asked, and cuDNN
    trains fewer head dims. A test holds this against the functions of a PyTorch that is built for CUDA.
    """
    on, (major, minor) = torch.backends.cuda, card.capability
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    if not fits or 0 in (*q.shape, *k.shape) or any(x.stride(-1) != 1 for x in (q, k, v)):
        return "math"
    d, wide = q.shape[-1], v.shape[-1]
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    equal = q.shape[1] == k.shape[1] == v.shape[1]
    one_head = SINCE_2_14 and k.shape[1] == v.shape[1] == 1
    grouped = equal or one_head or (gqa and q.shape[1] % k.shape[1] == q.shape[1] % v.shape[1] == 0)
    half = q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and major >= 8)

    wider = (not trains or d == wide == 256) if SINCE_2_14 else major == 9
    narrow = max(d, wide) <= (256 if wider else 128) or (d, wide) == (192, 128)
    cudnn = on.cudnn_sdp_enabled() and half and grouped and p * 16 % 1 == 0 and k.shape[2] > 1
    if cudnn and narrow and d % 8 == wide % 8 == 0 and major in (9, 10):
        return "cudnn"
    flash = on.flash_sdp_enabled() and half and grouped and major >= 8 and mask is None and d == wide <= 256
    small = not trains or d <= 192 or (d > 224 and p == 0) or (major, minor) not in ((8, 6), (8, 9), (12, 0), (12, 1))
    if flash and small and (not causal or q.shape[2] == k.shape[2]):
        return "flash"
    step = 8 if q.dtype in HALVES else 4 if major >= 8 else 1
    efficient = on.mem_efficient_sdp_enabled() and (grouped if SINCE_2_14 else equal) and d % step == wide % step == 0
    return "efficient" if efficient and (half or q.dtype == torch.float32) else "math"


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0, causal: bool = False, **options: Any
) -> Tensor:
    """F.scaled_dot_product_attention as on a card. Each kernel wants its inputs in its own way."""
    scale, gqa = options.get("scale"), options.get("enable_gqa", False)
    kind = backend(here.card, q, k, v, mask, p, causal, gqa)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=q.dtype))
    if kind == "math":
        if trains:
            why = "with grouped heads" if q.shape[-3] != k.shape[-3] else f"with {q.shape[-1]} numbers a head"
            dtype = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}.get(q.dtype, str(q.dtype))
            here.notes.add(f"Attention: {dtype} {why} has no fused kernel on this card: each layer keeps its scores.")
        return ATTENTION[kind](q, k, v, mask, p, causal, None, scale=scale, enable_gqa=gqa)[0]
    if kind == "flash":
        d = q.shape[-1]
        q, k, v = (F.pad(x, (0, -d % 8)) if d % 8 else x for x in (q, k, v))
        return ATTENTION[kind](q, k, v, p, causal, False, scale=scale or d**-0.5)[0][..., :d]
    if kind == "efficient" and mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):  # rows begin at multiples of 8
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*q.shape[:3], k.shape[2])
    return ATTENTION[kind](q, k, v, mask, trains, p, causal, scale=scale)[0]


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """F.dropout as on a card: the mask is one of bytes."""
    return torch.native_dropout(x, p, True)[0] if train and 0 < p < 1 else x * 0 if train and p == 1 else x


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """F.rms_norm as on a card: a layer norm, which keeps its input and numbers for each row, stands in."""
    if weight is not None and weight.dtype != x.dtype:  # then it is made of others, as on a CPU
        return aten.rms_norm.default.decompose(x, shape, weight, eps)
    with torch.autocast("cpu", enabled=False):
        return F.layer_norm(x, shape, weight)


OPERATORS = scaled_dot_product_attention, dropout, rms_norm

# Autocast. What CUDA's list has and the CPU's has not is cast up to FP32, but for these.
AS_IT_IS = """_convolution convolution cudnn_convolution cudnn_convolution_transpose addmv addr mv chain_matmul einsum
linalg_multi_dot _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell
rnn_relu_cell rnn_tanh_cell"""  # its parts are cast, or it does not come on a CPU
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"
RESULT = "softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
# What the CPU's list alone has is cast up there, but for these, which stay.
SAME = "cat stack index_copy _addmm_activation _native_multi_head_attention mkldnn_rnn_layer"


def rules() -> Iterator[tuple[Any, str, str]]:
    """Operators that autocast treats otherwise on a card: each with the rule there, and the rule on a CPU."""
    of_cuda, of_cpu = map(torch_private.registered, ("AutocastCUDA", "AutocastCPU"))
    for full in of_cuda ^ of_cpu:
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space != "aten" or name in f"{AS_IT_IS} {SAME}".split() or overload in ("padding", "names_dim", "dimname"):
            continue
        rule = "widest" if name in WIDEST.split() else "result" if name in RESULT.split() else "up"
        operator = getattr(getattr(aten, name), overload or "default")
        yield (operator, rule, "") if full in of_cuda else (operator, "", "up")


def with_rules(operator: Any, on_a_card: str, on_a_cpu: str) -> Callable[..., Any]:
    """The operator as autocast calls it. up: FP32; widest: FP32 if some are; result: only the result is FP32."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        rule = on_a_card if here.card else on_a_cpu
        if not rule:
            return operator.redispatch(keys & AFTER_AUTOCAST, *args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        given = any(isinstance(x, torch.dtype) for x in (*args, *kwargs.values()))
        if rule == "result" and tensors[0].dtype in HALVES and not given:
            kwargs["dtype"] = torch.float32
        if rule == "up" or (rule == "widest" and any(x.dtype == torch.float32 for x in tensors)):
            args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in HALVES else x, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return operator(*args, **kwargs)

    return run


def autocast_for_cuda() -> contextlib.AbstractContextManager:
    """torch.autocast("cuda") of this thread is on without a GPU. Around make(), too: some keep it as an object."""
    default = torch.get_autocast_dtype

    def init(before: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        cuda = device_type == "cuda"
        before(self, "cpu" if cuda else device_type, dtype or default("cuda") if cuda else dtype, *args, **kwargs)

    def asked(before: Any, *kind: str) -> Any:
        """A checkpoint asks what is on, and enters it again."""
        return before("cpu") if kind in ((), ("cuda",)) else before(*kind)

    questions = ((torch, name, asked) for name in ("is_autocast_enabled", "get_autocast_dtype"))
    return lent((torch.autocast, "__init__", init), *questions)


def of_sum(card: Gpu, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> int:
    """Columns are summed in pieces, which meet in memory, with a place for each thread."""
    kept = next((n for n in range(x.dim()) if n not in {d % x.dim() for d in dims or ()}), None)
    if not kept or not x.is_contiguous() or {d % x.dim() for d in dims} != set(range(kept)):
        return 0  # rows are summed with little
    rows, columns = math.prod(x.shape[:kept]), math.prod(x.shape[kept:])
    vector = math.gcd(columns, 4)
    width = min(1 << (columns // vector).bit_length() - 1, 32)
    height = min(1 << rows.bit_length() - 1, 512 // vector // width)
    each = -(-rows // height)
    grid, fit = -(-columns // vector // width), card.processors * (card.threads // (width * height))
    if each < 256 or grid > fit:
        return 0
    pieces = max(min(-(-fit // grid), -(-each // 16)), -(-each // 256))
    return 4 * columns * pieces * width * vector if pieces > 1 else 0


def of_embedding(card: Gpu, grad: Tensor, indices: Tensor, words: int, *_: Any) -> int:
    """The indices are sorted, and rows of one word are summed ten at a time."""
    n = indices.numel()
    return 0 if n <= 3072 else 4 * indices.nbytes + 4 * (n // 10 + min(n, words)) * grad.shape[-1]


SCRATCH: dict[str, Callable[..., int]] = {
    "aten.sum.dim_IntList": of_sum,
    "aten._softmax_backward_data.default": lambda card, grad, *_: grad.nbytes,  # grad * output
    "aten._safe_softmax.default": lambda card, x, *_: x.numel(),  # which scores are -inf: a byte each
    "aten.embedding_dense_backward.default": of_embedding,
}
for kind in ("efficient", "flash", "cudnn"):  # the gradient of the queries is summed in FP32; for cuDNN that is a guess
    SCRATCH[f"aten._scaled_dot_product_{kind}_attention_backward.default"] = lambda card, grad, q, *_, **__: (
        math.prod(q.shape[:2]) * (-(-q.shape[2] // 128) * 128) * (q.shape[3] + 1) * 4
    )


class Scratch(Watcher):
    """Around an operator of `SCRATCH` a tensor is alive, which the ledger sees."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if size := SCRATCH.get(str(func)):
            with having(making=place_of(args[0])):
                scratch = torch.empty(size(here.card, *args, **kwargs or {}), dtype=torch.uint8)  # noqa: F841
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def as_on(card: str, notes: set[str]) -> Iterator[None]:
    """Around the steps, inside the ledger. notes: gets sentences for the report."""

    def in_thread(operator: Any, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: (kernel if here.card else operator.decompose)(*args, **kwargs)

    with torch_private.lent_kernels() as lend, warnings.catch_warnings(action="ignore"):  # that they are overridden
        for kernel in OPERATORS:
            lend(kernel.__name__, in_thread(getattr(aten, kernel.__name__).default, kernel), "AutogradCPU")
        for operator, on_a_card, on_a_cpu in list(rules()):
            lend(operator, with_rules(operator, on_a_card, on_a_cpu), "AutocastCPU", with_keyset=True)
        room = workspace(card)
        if (recorder := current_recorder()) is not None:
            recorder.claim(room, "buffers", "cuBLAS's workspace")
        with having(card=GPUS[card], notes=notes), autocast_for_cuda(), Scratch():
            yield
