"""Against what one rank does by itself: it draws weights of its own after wrapping, or leaves out a step.

Lightning#6013: a module that is initialised after it was wrapped. accelerate#3797: a step that one rank leaves out.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minizero.engines.any_model.unit import Unit
from minizero.ranks.agreement import exchange


def digest(units: Sequence[Unit]) -> str:
    """Of the replicas: the sum of their bits, which is the same in any order."""
    bits = {2: torch.int16, 4: torch.int32}
    return str(sum(int(u.replica.detach().view(bits[u.dtype.itemsize]).sum(dtype=torch.int64)) for u in units))


def check_ranks(engine: Any) -> None:
    """`RuntimeError` if the ranks did not do the same before this backward. Collective; its words count as no bytes.

    engine.digest: of the parameters that the first forward had; "" afterwards. engine.stepped: has an optimizer made a
    step since the backward before?
    """
    digests, steps = zip(
        *(words.split() for words in exchange(engine.comm, "backward", f"-{engine.digest} {engine.stepped}")),
        strict=True,
    )
    ranks = engine.comm.ranks
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise RuntimeError(
                f"{engine.name}: rank {ranks[rank]} computes with other parameters than rank {ranks[0]}: initialise "
                "the module before wrapping it; afterwards load_full_state_dict(state) sets them on all ranks"
            )
    if len({*steps}) > 1:
        made, left_out = (ranks[steps.index(answer)] for answer in ("True", "False"))
        raise RuntimeError(
            f"{engine.name}: rank {left_out} left out the optimizer step that rank {made} made: let the ranks decide "
            'together, say by all_reduce(flag, comm, op="max"), or their parameters drift apart'
        )
