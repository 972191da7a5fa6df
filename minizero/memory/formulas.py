"""Bytes predicted: model states, activations and traffic, from formulas.

    model states per parameter (FP32, Adam)                  parameters 4 + gradients 4 + optimizer 8 = 16 bytes
    activations per transformer layer (16 bits, dropout)     s b h (34 + 5 a s / h) bytes

s: sequence length, b: batch size, h: width, a: heads. Rajbhandari et al., 2019, "ZeRO", sections 3 and 5;
Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1.
"""

import numbers
from typing import Any

import torch


def predict(
    n_parameters: int,
    world_size: int,
    stage: int,
    *,
    dtype: torch.dtype = torch.float32,
    sharding_factor: int | None = None,
    convention: str = "minizero",
) -> dict[str, float]:
    """Bytes per rank between steps, with Adam: `parameters`, `gradients`, `optimizer`, `total`.

    Ψ = n_parameters, N = world_size. If `sharding_factor`, a divisor of N, is given, it takes N's place.
    dtype: float32, float16 or bfloat16, as an engine takes it. `ValueError` for arguments that no engine could have.
    convention="minizero": what this code holds. In 16 bits that is an FP32 gradient beside the 16-bit one, because
    PyTorch refuses a 16-bit gradient on an FP32 parameter.
    convention="paper": the ZeRO paper's 2 + 2 + 12 bytes, in any dtype.
    """
    psi, stage, _, shards = _checked("predict", n_parameters, stage, world_size, sharding_factor)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"predict: dtype must be torch.float32, float16 or bfloat16, not {dtype!r}")
    if convention not in ("minizero", "paper"):
        raise ValueError(f"predict: convention must be 'minizero' or 'paper', not {convention!r}")
    one_in = [1 / shards if stage >= k else 1 for k in range(4)]  # one_in[k]: what stage k shards
    if convention == "paper":
        parts = {"parameters": 2 * psi * one_in[3], "gradients": 2 * psi * one_in[2], "optimizer": 12 * psi * one_in[1]}
    elif dtype == torch.float32:
        parts = {"parameters": 4 * psi * one_in[3], "gradients": 4 * psi * one_in[2], "optimizer": 8 * psi * one_in[1]}
    else:
        working = 2 * psi if stage < 2 else 0  # the 16-bit gradient that the ring averages
        parts = {
            "parameters": 2 * psi if stage < 3 else 0,  # a stage-3 replica exists only while a unit computes
            "gradients": working + 4 * psi * one_in[1],
            "optimizer": 12 * psi * one_in[1],
        }
    return parts | {"total": sum(parts.values())}


def predict_sent(
    n_parameters: int,
    world_size: int,
    stage: int,
    *,
    n_root: int = 0,
    bytes_each: int = 4,
    sharding_factor: int | None = None,
    reshard_after_forward: bool = True,
) -> float:
    """Bytes that a rank sends in a step: (N-1)/N of 2Ψ elements. In stage 3: of 3Ψ less the root unit's.

    Ψ = n_parameters, N = world_size; n_root: the root unit's parameters, which stage 3 gathers once only.
    With a `sharding_factor` F, the F ranks of a group send that among themselves: F takes N's place. Across the N/F
    groups a rank sends 2Ψ/F · (N/F-1)/(N/F) more. Without resharding, stage 3 gathers everything once only: 2Ψ.
    Buffers that forward writes come on top (engines/any_model/buffers.py).
    `ValueError` for arguments that no engine could have.
    """
    psi, stage, ranks, inside = _checked("predict_sent", n_parameters, stage, world_size, sharding_factor)
    (n_root,) = _whole("predict_sent", 0, n_root=n_root)
    (bytes_each,) = _whole("predict_sent", 1, bytes_each=bytes_each)
    if n_root > psi:
        raise ValueError(f"predict_sent: n_root ({n_root}) must be at most n_parameters ({psi})")
    elements = 3 * psi - n_root if stage == 3 and reshard_after_forward else 2 * psi
    groups = ranks // inside
    across = 2 * psi / inside * (groups - 1) / groups
    return bytes_each * (elements * (inside - 1) / inside + across)


def predict_activations(
    batch_size: int,
    sequence_length: int,
    width: int,
    heads: int,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: bool = False,
    convention: str = "minizero",
) -> dict[str, int]:
    """Bytes that one layer of the GPT keeps from forward to backward, by what they are; and their `total`.

    convention="paper": Korthikanti et al.'s s b h (34 + 5 a s / h), whatever the dtype. It counts 16 bits an element,
    and dropout with masks of 1 byte an element.
    convention="minizero": what PyTorch keeps on a CPU. There a mask has the layer's dtype (on a GPU 1 byte). And each
    norm keeps a mean and a deviation for every token, which the paper leaves out as small.
    `ValueError` for sizes below 1, heads that do not divide the width, a dtype in which no layer computes.
    """
    batch_size, sequence_length, width, heads = _whole(
        "predict_activations", 1, batch_size=batch_size, sequence_length=sequence_length, width=width, heads=heads
    )
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"predict_activations: dtype must be a floating torch.dtype of 16 bits or more, not {dtype!r}")
    if convention not in ("minizero", "paper"):
        raise ValueError(f"predict_activations: convention must be 'minizero' or 'paper', not {convention!r}")
    if width % heads:
        raise ValueError(f"predict_activations: width ({width}) must be divisible by heads ({heads})")
    paper = convention == "paper"
    each = 2 if paper else dtype.itemsize
    mask = (1 if paper else each) if dropout or paper else 0
    tokens = sequence_length * batch_size
    vectors, scores = tokens * width, tokens * heads * sequence_length  # elements: s b h, and a s² b
    parts = {
        "attention: input of the norm": each * vectors,
        "attention: input of the projection to q, k, v": each * vectors,
        "attention: q, k": 2 * each * vectors,
        "attention: v": each * vectors,
        "attention: output of the softmax": each * scores,
        "attention: dropout's mask over that": mask * scores,
        "attention: dropout's output": each * scores if mask else 0,
        "attention: input of the last projection": each * vectors,
        "attention: dropout's mask over its output": mask * vectors,
        "perceptron: input of the norm": each * vectors,
        "perceptron: input of the first layer": each * vectors,
        "perceptron: input of GELU": 4 * each * vectors,
        "perceptron: input of the second layer": 4 * each * vectors,
        "perceptron: dropout's mask over its output": mask * vectors,
        "norms: a mean and a deviation for each token": 0 if paper else 2 * 2 * each * tokens,
    }
    return parts | {"total": sum(parts.values())}


def _checked(function: str, n_parameters: Any, stage: Any, world_size: Any, factor: Any) -> list[int]:
    """Parameters, stage, ranks, and ranks that share one copy of the states: `factor`, or all if it is None."""
    psi, stage = _whole(function, 0, n_parameters=n_parameters, stage=stage)
    ranks, shards = _whole(function, 1, world_size=world_size, sharding_factor=world_size if factor is None else factor)
    if stage > 3:
        raise ValueError(f"{function}: stage must be 0, 1, 2 or 3, not {stage}")
    if ranks % shards:
        raise ValueError(f"{function}: sharding_factor ({shards}) must divide world_size ({ranks})")
    return [psi, stage, ranks, shards]


def _whole(function: str, lowest: int, **counts: Any) -> list[int]:
    """The counts as integers. `ValueError` for one that is below `lowest`, or no whole number."""
    for name, value in counts.items():
        kind = numbers.Integral if lowest else numbers.Real  # 7e9 parameters are a whole number, too
        if not isinstance(value, kind) or isinstance(value, bool) or value % 1 or value < lowest:
            raise ValueError(f"{function}: {name} must be a whole number of at least {lowest}, not {value!r}")
    return [int(value) for value in counts.values()]
