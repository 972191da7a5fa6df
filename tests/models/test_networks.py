"""The image set and the six networks: what they are made of."""

import hashlib
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.memory import Ledger
from minizero.models import images
from minizero.models.networks import NETWORKS, Branches, MaxPool, Residual

NAMES = list(NETWORKS)


def make(name):
    torch.manual_seed(0)
    return NETWORKS[name]()


def kernels(model):
    return [module.kernel_size for module in model.modules() if isinstance(module, nn.Conv2d)]


# The images.


def test_the_images_are_balanced_and_standardised():
    for split, each in (("train", 600), ("test", 200)):
        x, y = images.load(split)
        assert x.shape == (10 * each, 1, 28, 28) and x.dtype == torch.float32
        assert y.dtype == torch.long and torch.bincount(y).tolist() == [each] * 10
        assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
        pixels = (x * images.STANDARD_DEVIATION + images.MEAN) * 255
        assert torch.allclose(pixels, pixels.round(), atol=1e-3) and pixels.min() > -1e-3 and pixels.max() < 255.001


def test_the_file_is_the_one_described():
    readme = (images.FILE.parent / "README.md").read_text(encoding="utf-8")
    assert images.FILE.stat().st_size <= 4_000_000
    assert f"{images.FILE.stat().st_size:,} bytes" in readme
    assert re.findall(r"`([0-9a-f]{64})`", readme) == [hashlib.sha256(images.FILE.read_bytes()).hexdigest()]
    assert "MIT" in readme and "Zalando" in readme and "dataset-fashion-mnist" in readme
    with np.load(images.FILE) as file:
        assert {*file} == {"train_images", "train_labels", "test_images", "test_labels"}
        assert {array.dtype for array in file.values()} == {np.dtype("uint8")}


def test_batches_take_every_image_once_an_epoch():
    x, y = torch.arange(10.0), torch.arange(10)
    drawn = images.batches(x, y, 4, seed=3)
    epochs = [[next(drawn) for _ in range(2)] for _ in range(5)]  # two of the ten fill no batch
    for epoch in epochs:
        rows = torch.cat([labels for _, labels in epoch])
        assert len(rows.unique()) == 8
        assert all(torch.equal(images_, labels.float()) for images_, labels in epoch)
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])
    again = images.batches(x, y, 4, seed=3)
    assert all(torch.equal(next(again)[1], labels) for epoch in epochs for _, labels in epoch)
    assert not torch.equal(next(images.batches(x, y, 4, seed=4))[1], epochs[0][0][1])


def test_what_cannot_be_loaded():
    with pytest.raises(ValueError, match="split must be 'train' or 'test', not 'valid'"):
        images.load("valid")
    for size in (0, 11, -1):
        with pytest.raises(ValueError, match=f"batch_size must be from 1 to the 10 images, not {size}"):
            next(images.batches(torch.arange(10.0), torch.arange(10), size, 0))


# The networks.


@pytest.mark.parametrize("name", NAMES)
def test_logits_for_every_image_and_a_gradient_for_every_parameter(name):
    model, (x, y) = make(name), images.load("train")
    logits = model(x[:16])
    assert logits.shape == (16, 10) and logits.isfinite().all()
    F.cross_entropy(logits, y[:16]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert 15_000 < sum(p.numel() for p in model.parameters()) < 150_000
    model.eval()
    with torch.no_grad():
        assert torch.allclose(model(x[:1]), model(x[:16])[:1], atol=1e-4), "one image's logits are its own"


def test_alexnet_has_large_kernels_and_dropout_vgg_3_by_3_only_and_channels_that_double():
    alexnet, vgg = make("alexnet"), make("vgg")
    assert kernels(alexnet)[:2] == [(5, 5)] * 2 and set(kernels(alexnet)[2:]) == set(kernels(vgg)) == {(3, 3)}
    assert any(isinstance(module, nn.Dropout) for module in alexnet.modules())
    channels = [module.out_channels for module in vgg.modules() if isinstance(module, nn.Conv2d)]
    assert channels == [12, 12, 24, 24, 48, 48]


def test_the_inceptions():
    one, two, three = (make(f"inception_v{version}") for version in (1, 2, 3))
    for model in (one, two, three):
        modules = [module for module in model.modules() if isinstance(module, Branches)]
        x = torch.randn(2, modules[0][0][0].in_channels, 14, 14)
        assert modules[0](x).shape == (2, sum(branch(x).shape[1] for branch in modules[0]), 14, 14)
        assert [branch(x).shape[2:] for branch in modules[0]] == [(14, 14)] * 4

    norms = [sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) for model in (one, two, three)]
    assert norms == [0, len(kernels(two)), len(kernels(three))]
    assert (5, 5) in kernels(one)[1:] and (5, 5) not in kernels(two)[1:] and (5, 5) not in kernels(three)
    assert {(1, 7), (7, 1), (1, 3), (3, 1)} <= set(kernels(three)) and (1, 7) not in kernels(two)


def test_a_residual_block_adds_to_its_input():
    x = torch.randn(2, 4, 6, 6)
    for block in (Residual(4, 4), Residual(4, 8, stride=2)):
        for parameter in block.f.parameters():
            nn.init.zeros_(parameter)
        assert torch.equal(block(x), block.shortcut(x).relu())
    torch.manual_seed(0)
    assert Residual(4, 4).f(x).min() < 0  # what is added may be negative: the ReLU comes after the sum
    assert isinstance(Residual(4, 4).shortcut, nn.Identity)
    assert Residual(4, 8, stride=2)(x).shape == (2, 8, 3, 3)


@pytest.mark.parametrize("shape", [(3, 2, 6, 8), (1, 1, 7, 5), (2, 3, 2, 2)])
def test_max_pool_is_pytorchs_without_its_indices(shape):
    torch.manual_seed(0)
    one = torch.randn(shape, requires_grad=True)
    other = one.detach().clone().requires_grad_()
    ours, theirs = MaxPool()(one), nn.MaxPool2d(2)(other)
    weights = torch.randn(ours.shape)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(one.grad, other.grad)

    held = []
    for pool in (MaxPool(), nn.MaxPool2d(2)):
        with Ledger() as ledger:
            y = pool(one)
            held.append(ledger.current["total"] - 4 * y.numel())
    assert held == [0, 8 * y.numel()]
