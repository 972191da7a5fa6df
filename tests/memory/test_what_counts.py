"""Every storage counts once, with the bytes that it has at that moment."""

import contextlib
import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from minizero.memory import CATEGORIES, Ledger, tag


def test_views_count_once_and_resized_storages_as_they_are():
    with Ledger() as ledger:
        a = torch.zeros(1000)
        view, other = a[10:], a.view(10, 100).t()
        assert ledger.current["total"] == 4000
        a.untyped_storage().resize_(0)
        assert ledger.current["total"] == 0
        a.untyped_storage().resize_(4000)
        b = torch.empty(0)
        b.resize_(500)
        assert ledger.current["total"] == 6000
        tag(b, "gradients")
        assert ledger.current["gradients"] == 2000
        del a, view, other, b
        assert ledger.current["total"] == 0
    assert [s["total"] for s in ledger.curve if s["total"]] == [4000, 4000, 4000, 6000, 2000]
    assert ledger.peak == dict.fromkeys(CATEGORIES, 0) | {"temporary": 4000, "gradients": 2000, "total": 6000}


def loaded(tensor):
    torch.save(tensor, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


OLD = torch.ones(100)
MADE = {
    "torch.tensor": lambda: torch.tensor([1.0] * 100),
    "deepcopy": lambda: copy.deepcopy(OLD),
    "torch.load": lambda: loaded(OLD),
    "out=, which grows": lambda: torch.add(OLD, 1, out=torch.empty(0)),
    "frombuffer": lambda: torch.frombuffer(bytearray(400), dtype=torch.float32),
    "asarray of a buffer": lambda: torch.asarray(memoryview(bytearray(400)), dtype=torch.float32),
    "from_dlpack": lambda: torch.from_dlpack(np.ones(100, np.float32)),
    "utils.dlpack.from_dlpack": lambda: torch.utils.dlpack.from_dlpack(np.ones(100, np.float32)),
    "set_ to a storage": lambda: torch.empty(0).set_(torch.UntypedStorage(400)),
    "set_ to a buffer": lambda: torch.empty(0).set_(
        torch.UntypedStorage.from_buffer(bytearray(400), byte_order="little", dtype=torch.float32)
    ),
    "a copy of a storage": lambda: torch.empty(0).set_(torch.ones(100).untyped_storage().clone()),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_tensors_that_no_operator_makes_count(make):
    with Ledger() as ledger:
        kept = make()
        assert ledger.current["total"] == 400 and ledger.current["temporary"] == 400
        del kept
        assert ledger.current["total"] == 0
    assert make().nbytes == 400 and ledger.current["total"] == 0  # afterwards they tell nobody


def test_another_name_for_an_older_tensor_adds_no_bytes():
    with Ledger() as ledger:
        kept = [torch.asarray(OLD), torch.asarray(obj=OLD), torch.as_tensor(OLD), torch.from_dlpack(OLD)]
        assert ledger.current["total"] == 0 and all(new.data_ptr() == OLD.data_ptr() for new in kept)


def test_inference_mode_hides_no_copy():
    """There `to`, `reshape` and `contiguous` come whole, and say that they give a view."""
    old = torch.ones(10, 10)
    with Ledger() as ledger, torch.inference_mode():
        kept = [old.to(torch.float64), old.t().contiguous(), old.t().reshape(100)]
        assert ledger.current["total"] == sum(tensor.nbytes for tensor in kept) == 1600
        kept += [old.to(torch.float32), old.contiguous(), old.reshape(100), kept[0].view(100)]  # these are views
        assert ledger.current["total"] == 1600


def test_what_has_no_bytes_holds_none():
    with Ledger() as ledger:
        kept = [torch.empty(0), torch.ones(10)]
        assert len(kept) == 2 and [row["operator"] for row in ledger.holders] == ["aten.ones.default"]


def test_a_storage_at_the_address_of_one_that_is_gone_is_another():
    with Ledger() as ledger:
        for _ in range(1000):  # no allocator promises to give an address again, or soon
            address = (tensor := torch.empty(10)).untyped_storage()._cdata
            del tensor
            storages = [torch.UntypedStorage(40) for _ in range(100)]
            same = [storage for storage in storages if storage._cdata == address]
            if same:
                break
        (storage,) = same
        tag(torch.empty(0).set_(storage), "communication")
        assert ledger.current["communication"] == 40


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("to", [torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc, torch.Tensor.to_mkldnn])
def test_a_layout_whose_bytes_nobody_sees_is_refused_by_name(to):
    with pytest.raises(NotImplementedError, match="layout torch.(_mkldnn|sparse_cs)"), Ledger():
        to(torch.eye(10))


def test_a_tensor_made_of_tensors_counts_as_those():
    """As DTensor is, of which PyTorch's own sharding is made: the outside has no bytes."""
    inside = torch.ones(100), torch.ones(100)
    module = nn.Module()
    module.weight = nn.Parameter(TwoTensor(*inside))
    with Ledger(module) as ledger:
        assert ledger.current["parameters"] == 800
        twice = module.weight * 2
        assert ledger.current["total"] == 1600 and twice.a.sum() == 200


def test_a_sparse_gradient_counts_by_its_values_and_indices():
    table = nn.Embedding(1000, 10, sparse=True)
    with Ledger(table) as ledger:
        table(torch.tensor([1, 2])).sum().backward()
        gradient = table.weight.grad
        assert gradient.is_sparse and ledger.current["gradients"] == 2 * 10 * 4 + 2 * 8
        before = ledger.current["temporary"]
        kept = gradient.clone()
        assert ledger.current["temporary"] == before + 2 * 10 * 4 + 2 * 8 and kept.is_sparse


@pytest.mark.parametrize("how", [{"fake": True}, {"fake": True, "inside": True}, {"device": "meta"}], ids=str)
def test_a_step_that_only_pretends_counts_like_a_real_one(how):
    """Every figure to the byte: a model that does not fit is measured so. On a CPU meta takes the GPU's ways."""

    def peak(fake=False, inside=False, device="cpu"):
        mode = FakeTensorMode() if fake else contextlib.nullcontext()
        with mode, torch.device(device):
            module = nn.Sequential(nn.Linear(100, 200), nn.GELU(), nn.Dropout(), nn.Linear(200, 50))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
            x = torch.randn(30, 100)
        with Ledger(module, optimizer) as ledger, mode if inside else contextlib.nullcontext():
            for _ in range(2):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return ledger.peak

    real, pretended = peak(), peak(**how)
    assert real["activations"] > 48_000 and real["parameters"] == real["optimizer"] == 121_000
    assert all(pretended[key] == real[key] for key in CATEGORIES if key != "temporary")
    assert pretended["total"] == pytest.approx(real["total"], rel=0.01)
