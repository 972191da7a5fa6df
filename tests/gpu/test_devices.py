"""What a GPU refuses to mix, and what it allows. tests/rehearsal pretends to be one, and has to say the same."""

import numpy as np
import pytest
import torch

from tests.gpu.device import DEVICE, marks, needs_gpu

pytestmark = [*marks, needs_gpu("a second device")]

REFUSED = {
    "add": lambda here, there: here + there,
    "its own scalar to a tensor of the CPU": lambda here, there: there + here.sum(),
    "in place": lambda here, there: there.add_(here),
    "into a scalar of the CPU": lambda here, there: there.sum().add_(here.sum()),
    "matmul": lambda here, there: here @ there,
    "cat": lambda here, there: torch.cat([here, there]),
    "stack of scalars": lambda here, there: torch.stack([here.sum(), there.sum()]),
    "where": lambda here, there: torch.where(here > 0, here, there),
    "equal": lambda here, there: torch.equal(here, there),
    "an index of the GPU": lambda here, there: there[here.long()],
    "a mask of the GPU": lambda here, there: there[here > 0],
    "put": lambda here, there: here.index_put_((here[0].long(),), there),
    "index_select": lambda here, there: here.index_select(0, there[0].long()),
    "gather": lambda here, there: here.gather(0, there.long()),
    "embedding": lambda here, there: torch.nn.functional.embedding(there.long(), here),
    "loss": lambda here, there: torch.nn.functional.cross_entropy(here, there[0].long()),
    "linear": lambda here, there: torch.nn.functional.linear(here, here, there[0]),
    "layer norm": lambda here, there: torch.nn.functional.layer_norm(here, (3,), there[0]),
    "lists": lambda here, there: torch._foreach_add([here, here], [here, there]),
    "out": lambda here, there: torch.add(here, here, out=there),
    "numpy": lambda here, there: here.numpy(),
    "an array": lambda here, there: np.asarray(here),
    "generator of the CPU": lambda here, there: torch.rand(3, device=here.device, generator=torch.Generator()),
    "in place with a generator of the CPU": lambda here, there: here.normal_(generator=torch.Generator()),
    "generator of the GPU": lambda here, there: torch.rand(3, generator=torch.Generator(here.device)),
    "a gradient of the CPU": lambda here, there: setattr(here.clone().requires_grad_(), "grad", there),
}

ALLOWED = {
    "add a scalar of the CPU": lambda here, there: here + there.sum(),
    "times a scalar of the CPU, in place": lambda here, there: here.mul_(there.sum()),
    "copy": lambda here, there: here.copy_(there),
    "fill": lambda here, there: here.fill_(there.sum()),
    "a slice": lambda here, there: here.__setitem__(slice(0, 1), there[:1]),
    "an index of the CPU": lambda here, there: here[there.long()],
    "put a scalar": lambda here, there: here.__setitem__(here > 0, there.sum()),
    "where with a scalar": lambda here, there: torch.where(here > 0, here, there.sum()),
    "mask with a scalar": lambda here, there: here.masked_fill(here > 0, there.sum()),
    "lists and scalars": lambda here, there: torch._foreach_mul([here, here], there.sum()),
    "choose by a number": lambda here, there: there[here[0, 0].long()],
    "data of another device": lambda here, there: setattr(there, "data", here),
    "new, like, to": lambda here, there: here.new_ones(3) + torch.ones_like(here) + there.to(here),
    "copy.deepcopy": lambda here, there: here + torch.nn.Parameter(here).__deepcopy__({}) + here.__deepcopy__({}),
    "double backward": lambda here, there: twice(there.requires_grad_()),
}


def twice(x):
    (first,) = torch.autograd.grad((x.to(DEVICE) ** 3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0] + x  # both on the CPU


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[name](torch.ones(3, 3, device=DEVICE), torch.ones(3, 3))


@pytest.mark.parametrize("name", ALLOWED)
def test_it_is_allowed(name):
    ALLOWED[name](torch.ones(3, 3, device=DEVICE), torch.ones(3, 3))
