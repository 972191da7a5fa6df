"""The loss in chunks: cross-entropy of hidden @ weight.T, without the matrix of all logits.

8,192 tokens and a vocabulary of 128,000 make 4.2 GB of logits in FP32. Backward adds their gradient, which is as large.
But the loss is a sum over tokens, and what one token adds to it follows from its own row of logits:

    z = W h + b                           h: the token's hidden vector; z has a logit for each word
    L = log Σ exp(z) − z_y                y: its target
    ∂L/∂z = p − e_y                       p = exp(z) / Σ exp(z); e_y: 1 at y, 0 elsewhere
    ∂L/∂h = W.T ∂L/∂z        ∂L/∂W = Σ ∂L/∂z h.T        ∂L/∂b = Σ ∂L/∂z        Σ over tokens

Forward makes these gradients at once, while a chunk's logits are there. The next chunk's take their place. Backward
multiplies the gradients by the gradient of the loss, one number, in place. The price: from forward to backward the
gradients of h and W are held, (tokens + vocabulary) · width numbers. The logits are more if both are at least twice the
width.

Hsu et al., 2024, "Liger Kernel" (fused linear cross-entropy). Wijmans et al., 2024, "Cut Your Losses in
Large-Vocabulary Language Models", never writes even a chunk's logits to memory: its softmax runs online, as flash's.
PyTorch has `F.linear_cross_entropy` since 2.13.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from minizero import torch_private
from minizero.memory import tag


def loss_and_gradients(
    needed: Sequence[bool],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk: int,
    ignore_index: int,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The sum of the tokens' losses, and its gradients by hidden, weight and bias: None for one that is not `needed`.

    The loss, the weight's gradient and the bias's are sums over tokens. Those of 16-bit numbers are FP32.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    by_hidden = torch.zeros_like(hidden) if needed[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    by_bias = torch.zeros_like(weight[:, 0], dtype=wide) if needed[2] else None
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        h, y = hidden[rows], targets[rows, None]
        counts = y != ignore_index
        y = y.masked_fill(~counts, 0)
        z = by_z = None  # the last chunk's logits go before the next come
        z = F.linear(h, weight, bias)
        narrow, z = z.dtype, z.to(wide)
        z -= z.amax(1, keepdim=True)  # changes neither L nor p, and no exp overflows
        z_y = z.gather(1, y)
        total = z.exp_().sum(1, keepdim=True)
        loss += torch.where(counts, total.log() - z_y, 0).sum()
        if not any(needed):
            continue
        by_z = z.mul_(counts / total).scatter_add_(1, y, -counts.to(wide))  # ∂L/∂z, or 0 without a target
        if by_bias is not None:
            by_bias += by_z.sum(0)
        z = by_z = by_z.to(narrow)
        if by_hidden is not None:
            by_hidden[rows] = by_z @ weight
        if by_weight is not None and narrow == wide:
            by_weight.addmm_(by_z.T, h)  # the product is added where it is made, and is no matrix of its own
        elif by_weight is not None:  # a product in 16 bits is: of so many words that it is no larger than the logits
            words = max(1, chunk * len(weight) // max(1, weight.shape[1]))
            for sums, columns in zip(by_weight.split(words), by_z.split(words, dim=1)):
                sums += columns.T @ h
    return loss, [by_hidden, by_weight, by_bias]


class LossInChunks(torch.autograd.Function):
    """One node of the graph, whose forward makes the gradients."""

    @staticmethod
    def forward(ctx: Any, has_backward: bool, *inputs: Any) -> torch.Tensor:
        needed = [needs and has_backward for needs in ctx.needs_input_grad[1:4]]
        loss, gradients = loss_and_gradients(needed, *inputs)
        if gradients[1] is not None:
            tag(gradients[1], "gradients")
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, by_loss: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy_in_chunks: its gradients have no graph, so there is no second derivative: leave "
                "create_graph=True away, or use F.cross_entropy"
            )
        # by_loss has the loss scale, and the mean's 1/n. With a dimension it makes the product FP32, which is rounded
        # once. A backward after this one, if there may be one, needs what is here.
        multiply = torch.mul if torch_private.keeps_graph() else torch.Tensor.mul_
        gradients = (None if made is None else multiply(made, by_loss[None]) for made in ctx.saved_tensors)
        return None, *gradients, None, None, None


def cross_entropy_in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk: int,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The cross-entropy of `hidden @ weight.T + bias` in nats, in FP32 (FP64 for FP64).

    hidden: (…, width). weight: (vocabulary, width), such as an embedding's. bias: (vocabulary,).
    targets: (…) of int64 below the vocabulary; a position with `ignore_index` has no target, and counts for nothing.
    chunk: how many tokens at a time. Their logits take chunk · vocabulary · 4 bytes; in 16 bits 6, for a moment.
    reduction: "mean" over the targets, or "sum". Without any target both are 0, and so are the gradients, as in
    `accumulate`; PyTorch's mean is NaN.

    From forward to backward (tokens · s + vocabulary · 4) · width bytes are held, s of them for a number of `hidden`.
    Backward multiplies in place; in 16 bits the weight's gradient is then rounded, 2 bytes a number beside the 4. After
    retain_graph=True it makes copies.

    `ValueError` for wrong shapes, no words, a chunk below 1, or another reduction; `TypeError` if targets are not
    int64, ignore_index is no whole number, or the others are no floating-point tensors.
    `RuntimeError` for a second derivative, in a transform of torch.func and, by PyTorch, for a target that is no word
    and for two dtypes.
    """
    numbers = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    for tensor in (*numbers, targets):
        if not isinstance(tensor, torch.Tensor) or (tensor is not targets and not tensor.is_floating_point()):
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"cross_entropy_in_chunks: expected floating-point tensors, and targets, not {what}")
    if torch_private.function_transform_is_active():
        raise RuntimeError(
            "cross_entropy_in_chunks: torch.func's transforms (grad, vmap) cannot enter it: use backward, or "
            "F.cross_entropy"
        )
    fit = weight.dim() == 2 and weight.shape[1:] == hidden.shape[-1:] and targets.shape == hidden.shape[:-1]
    if not fit or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [str(tuple(tensor.shape)) for tensor in (*numbers[:2], targets, *numbers[2:])]
        raise ValueError(
            "cross_entropy_in_chunks: hidden must be (…, width), weight (vocabulary, width), targets (…), and bias, if "
            f"any, (vocabulary,), not {', '.join(shapes)}"
        )
    if targets.dtype != torch.int64:
        raise TypeError(f"cross_entropy_in_chunks: targets must be int64, as F.cross_entropy's, not {targets.dtype}")
    if type(ignore_index) is not int:
        raise TypeError(f"cross_entropy_in_chunks: ignore_index must be a whole number, not {ignore_index!r}")
    if not weight.shape[0]:
        raise ValueError("cross_entropy_in_chunks: weight has no row: a vocabulary has at least one word")
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"cross_entropy_in_chunks: chunk must be a number of tokens, at least 1, not {chunk!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'cross_entropy_in_chunks: reduction must be "mean" or "sum", not {reduction!r}')
    flat = hidden.reshape(targets.numel(), hidden.shape[-1]), weight, bias, targets.reshape(-1)
    loss = LossInChunks.apply(torch.is_grad_enabled(), *flat, chunk, ignore_index)
    return loss if reduction == "sum" else loss / (targets != ignore_index).sum().clamp(min=1)
