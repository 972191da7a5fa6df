"""What the exercises share in which a run looks healthy and is not.

The first optimizer of a process makes PyTorch import for a second or more. It is made here, so that this time does not
count as the student's.
"""

import torch

torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def fell(losses: list[float]) -> str:
    """How the loss of a run went, in words."""
    went = "falls" if losses[-1] < losses[0] else "rises"
    return f"The loss {went} from {losses[0]:.3f} to {losses[-1]:.3f}"
