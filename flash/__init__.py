"""Exact attention in linear memory: softmax(Q Kᵀ · scale) V without the matrix of scores.

Softmax needs the largest score of a row and the sum of its exponentials, and both can be kept up
to date while the keys go by block by block: when a larger score appears, what was summed so far is
scaled by exp(old maximum - new maximum). Hence the N × N scores are never stored: a block of them
lives in fast on-chip memory, is used, and is gone. The backward pass computes them once more from
Q, K and one number per row, the logsumexp.

Reading order:

    reference    the textbook's attention, with every option: the oracle
    tiled        online softmax, block by block, forward and backward, in plain PyTorch
    tiles        how that work is cut into blocks
    options      what the options mean: the band of visible keys, the dropout mask
    checks       what is accepted, and what an error says
    traffic      bytes between HBM and SRAM: a model, and a counter that agrees with it
    kernels      the same as `tiled` in Triton
    masks        what each option adds to the kernels
    launch       block shapes for each GPU
    compile      registers, spills and shared memory, known without a GPU
    attention    flash_attention: one function for CPU and GPU

Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax" (the running sum);
Dao, Fu, Ermon, Rudra & Ré, 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness" (the tiles, the backward pass, and why moving fewer bytes is faster).
"""

import os
import sys

import torch

# Without a GPU Triton's interpreter runs the kernels. Triton asks for this when it is first imported.
if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flash.attention import flash_attention, flash_attention_varlen, merge  # noqa: E402
from flash.reference import attention_reference  # noqa: E402
from flash.tiled import attention_tiled  # noqa: E402
from flash.traffic import choose_blocks, hbm_bytes  # noqa: E402

__all__ = [
    "attention_reference",
    "attention_tiled",
    "choose_blocks",
    "flash_attention",
    "flash_attention_varlen",
    "hbm_bytes",
    "merge",
]
