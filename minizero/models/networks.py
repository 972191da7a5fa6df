"""Six image networks, each after the one that won its year, cut down to 28 × 28 pixels in grey and 10 classes.

    alexnet        large kernels first, then 3 × 3; dropout before the linear layers
    vgg            3 × 3 convolutions only, in pairs; each pooling doubles the channels
    inception_v1   GoogLeNet: 1 × 1, 3 × 3, 5 × 5 and pooling side by side, and no large linear layer
    inception_v2   two 3 × 3 in place of the 5 × 5, and batch norm after every convolution
    inception_v3   n × n convolutions as 1 × n and n × 1; pooling and striding side by side
    resnet         blocks that add to their input

They keep the idea and the order of the layers, not the sizes: they take about a thousandth of the originals' work.
Krizhevsky et al., 2012; Simonyan & Zisserman, 2014; Szegedy et al., 2014; Ioffe & Szegedy, 2015;
Szegedy et al., 2015, "Rethinking the Inception Architecture"; He et al., 2015.
Every network takes (batch, 1, 28, 28) and gives (batch, 10) logits.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, norm: bool = False
) -> nn.Sequential:
    """Convolution, batch norm if wanted, ReLU. Height and width stay, or are divided by the stride."""
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    # Batch norm has a bias of its own.
    layer = nn.Conv2d(inputs, outputs, (height, width), stride, (height // 2, width // 2), bias=not norm)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # else deep networks without batch norm hardly learn
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU()) if norm else nn.Sequential(layer, nn.ReLU())


normalised = functools.partial(convolution, norm=True)


class MaxPool(nn.Module):
    """The largest of each 2 × 2 pixels. An odd last row or column is left out.

    nn.MaxPool2d gives the same, but keeps a 64-bit index for every pixel until backward, in 16-bit training too.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2] // 2, x.shape[-1] // 2
        x = x[..., : 2 * height, : 2 * width]
        return x.unflatten(-1, (width, 2)).unflatten(-3, (height, 2)).amax((-3, -1))


def alexnet() -> nn.Module:
    """Few convolutions with large kernels first, then two linear layers. Krizhevsky et al., 2012."""
    return nn.Sequential(
        convolution(1, 16, 5),
        MaxPool(),  # 14 × 14
        convolution(16, 32, 5),
        MaxPool(),  # 7 × 7
        convolution(32, 48, 3),
        convolution(48, 48, 3),
        convolution(48, 32, 3),
        MaxPool(),  # 3 × 3
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 3 * 3, 128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def vgg() -> nn.Module:
    """Many convolutions of 3 × 3. Simonyan & Zisserman, 2014."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 12), (12, 24), (24, 48)):  # 28 × 28, 14 × 14, 7 × 7
        layers += [convolution(inputs, outputs, 3), convolution(outputs, outputs, 3), MaxPool()]
    layers += [nn.Flatten(), nn.Linear(48 * 3 * 3, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


class Branches(nn.ModuleList):
    """Modules side by side on one input, (batch, channels, height, width); their channels are concatenated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


def classifier(channels: int) -> nn.Sequential:
    """The mean over all positions, and one linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def inception_v1() -> nn.Module:
    """Branches of 1 × 1, 3 × 3 and 5 × 5 side by side. Szegedy et al., 2014 (GoogLeNet)."""

    def module(inputs: int, width: int) -> Branches:
        return Branches(
            [
                convolution(inputs, width, 1),
                nn.Sequential(convolution(inputs, width, 1), convolution(width, 2 * width, 3)),
                nn.Sequential(convolution(inputs, width // 2, 1), convolution(width // 2, width, 5)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution(inputs, width, 1)),
            ]
        )

    return nn.Sequential(
        convolution(1, 16, 5, stride=2),  # 14 × 14
        convolution(16, 24, 3),
        module(24, 8),  # 5 · 8 = 40 channels
        module(40, 12),
        MaxPool(),  # 7 × 7
        module(60, 16),
        module(80, 16),
        classifier(80),
    )


def inception_v2() -> nn.Module:
    """With batch norm, and two 3 × 3 in place of a 5 × 5. Ioffe & Szegedy, 2015."""

    def module(inputs: int, width: int) -> Branches:
        two_of_3 = nn.Sequential(normalised(width // 2, width, 3), normalised(width, width, 3))
        return Branches(
            [
                normalised(inputs, width, 1),
                nn.Sequential(normalised(inputs, width, 1), normalised(width, 2 * width, 3)),
                nn.Sequential(normalised(inputs, width // 2, 1), two_of_3),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), normalised(inputs, width, 1)),
            ]
        )

    return nn.Sequential(
        normalised(1, 16, 5, stride=2),  # 14 × 14
        normalised(16, 24, 3),
        module(24, 8),
        module(40, 8),
        MaxPool(),  # 7 × 7
        module(40, 16),
        classifier(80),
    )


def inception_v3() -> nn.Module:
    """With n × n factorised into 1 × n and n × 1. Szegedy et al., 2015."""

    def module(inputs: int, width: int, n: int) -> Branches:
        def factorised(channels: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(normalised(channels, channels, (1, n)), normalised(channels, outputs, (n, 1)))

        twice = nn.Sequential(factorised(width, width), factorised(width, width))
        return Branches(
            [
                normalised(inputs, width, 1),
                nn.Sequential(normalised(inputs, width, 1), factorised(width, 2 * width)),
                nn.Sequential(normalised(inputs, width, 1), twice),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), normalised(inputs, width, 1)),
            ]
        )

    return nn.Sequential(
        normalised(1, 16, 3, stride=2),  # 14 × 14
        normalised(16, 24, 3),
        module(24, 8, 7),
        Branches([MaxPool(), normalised(40, 24, 3, stride=2)]),  # 7 × 7; 40 + 24 = 64 channels
        module(64, 16, 3),
        classifier(80),
    )


class Residual(nn.Module):
    """relu(x + f(x)), f: two 3 × 3 convolutions. If f changes the size, x goes through a 1 × 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        second = normalised(outputs, outputs, 3)[:-1]  # the ReLU comes after the sum
        self.f = nn.Sequential(normalised(inputs, outputs, 3, stride), second)
        changes = stride != 1 or inputs != outputs
        self.shortcut = normalised(inputs, outputs, 1, stride)[:-1] if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x) + self.f(x))


def resnet() -> nn.Module:
    """Blocks that add to their input. He et al., 2015."""
    return nn.Sequential(
        normalised(1, 12, 3),
        Residual(12, 12),
        Residual(12, 24, stride=2),  # 14 × 14
        Residual(24, 24),
        Residual(24, 48, stride=2),  # 7 × 7
        Residual(48, 48),
        classifier(48),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    network.__name__: network for network in (alexnet, vgg, inception_v1, inception_v2, inception_v3, resnet)
}
