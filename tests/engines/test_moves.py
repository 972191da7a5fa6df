"""A move to where a model already is changes nothing, and any other move is refused."""

import pytest
import torch
from torch import nn

from tests.support.helpers import STAGES
from tests.support.small_models import Blocks, seeded, wrapped


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_move_to_where_it_is_changes_nothing(stage, dtype):
    class Convolution(Blocks):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(2, 2, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    @wrapped(stage, seeded(Convolution), dtype=dtype)
    def _(model, comm):
        here = dtype or torch.float32
        for same in (model, nn.Sequential(model)):
            for moved in (same.to("cpu"), same.cpu(), same.to(here), same.to(torch.empty(0, dtype=here))):
                assert moved is same
        for moved in (lambda: model.to("meta"), model.double, lambda: model.to_empty(device="cpu"), model.share_memory):
            with pytest.raises(RuntimeError, match=f"{stage.__name__}: (move or cast|cannot be shared)"):
                moved()
        with pytest.raises(RuntimeError, match="move or cast"):
            model.to(memory_format=torch.channels_last)
