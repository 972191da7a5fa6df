"""Against what one rank does by itself: it draws weights of its own after wrapping, or leaves out a step.

Lightning#6013: a module that is initialised after it was wrapped. accelerate#3797: a step that one rank leaves out.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from minizero.engines.any_model.unit import Unit
from minizero.ranks.agreement import agreement
from minizero.ranks.comm import Comm
from minizero.ranks.errors import CollectiveMismatch

WHAT_TO_DO = {
    "parameters": "initialise the module before wrapping it; afterwards load_full_state_dict(state) sets all ranks'",
    "step": "if a rank leaves out an optimizer step, all must: let them decide together, by all_reduce(…, op='max')",
}


def digest(units: Sequence[Unit]) -> str:
    """Of the replicas: the sum of their bits, 16 by 16."""
    real = [unit.replica for unit in units if type(unit.replica) is torch.Tensor]  # a fake one has no numbers
    return str(sum(int(replica.view(torch.int16).sum(dtype=torch.int64)) for replica in real))


def check_ranks(stage: str, comm: Comm, done: dict[str, Any]) -> None:
    """`CollectiveMismatch` if the ranks did not do the same before this backward. Collective, of no bytes.

    done: "parameters", the `digest` of those that the first forward had, and whether an optimizer has made a "step"
    since the backward before. Afterwards it is empty.
    """
    what = "parameters" if "parameters" in done else "step"
    unseen: Any = SimpleNamespace(transport=comm.transport, observers=[])  # it is no part of a step
    try:
        with agreement(unseen, "end of backward", **{what: done.get(what, False)}):
            done.clear()
    except CollectiveMismatch as error:
        raise CollectiveMismatch(f"{stage}: {error} They differ in their {what}: {WHAT_TO_DO[what]}") from error
