"""Ring attention on a page, forward only: read this first.

A text of n tokens is cut: each of N ranks has n/N queries, keys and values. Keys and values go round the ring. After
N - 1 hops every query has met every key, and a rank has held those of three ranks at most: its own, visiting, incoming.

The last line of the loop works because a softmax can be put together from parts: `merge` (flash/attention.py).
`ring_attention.py` adds the gradients, and causal attention in which all ranks compute equally much.
Liu, Zaharia & Abbeel, 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

import torch

from flash import flash_attention, merge
from minizero.ranks.comm import Comm


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks. q, k, v, and the result: (batch, heads, n/N, d)."""
    out, lse = flash_attention(q, k, v, return_lse=True)
    visiting = torch.stack([k, v])
    for _ in range(comm.size - 1):
        incoming = torch.empty_like(visiting)
        comm.send_recv(visiting, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        visiting = incoming
        out, lse = merge(out, lse, *flash_attention(q, *visiting, return_lse=True))
    return out
