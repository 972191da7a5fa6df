"""Exact attention in linear memory: softmax(Q Kᵀ · scale) V without the matrix of scores.

Softmax needs the largest score of a row and the sum of its exponentials, and both can be kept up
to date while the keys go by block by block: when a larger score appears, what was summed so far is
scaled by exp(old maximum - new maximum). Hence the N × N scores are never stored: a block of them
lives in fast on-chip memory, is used, and is gone. The backward pass computes them once more from
Q, K and one number per row, the logsumexp.

Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax" (the running sum);
Dao, Fu, Ermon, Rudra & Ré, 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness" (the tiles, the backward pass, and why moving fewer bytes is faster).
"""
