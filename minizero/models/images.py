"""The image set that ships: 8,000 pictures of clothes, 28 × 28 in grey, 10 classes (a part of Fashion-MNIST).

Xiao, Rasul & Vollgraf, 2017, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms".
data/images/README.md names the classes, the source and the licence.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).parent.parent / "data" / "images" / "fashion-mnist.npz"

# Of the training pixels, divided by 255.
MEAN, STANDARD_DEVIATION = 0.2869, 0.3538


def load(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images, (n, 1, 28, 28) in FP32 with mean 0 and variance 1, and their classes, (n,) integers from 0 to 9.

    split: "train" (6,000 images, 600 of each class) or "test" (2,000, 200 of each class). Raises `ValueError` for
    another one.
    """
    if split not in ("train", "test"):
        raise ValueError(f"load: split must be 'train' or 'test', not {split!r}")
    with np.load(FILE) as file:
        images, labels = (torch.from_numpy(file[f"{split}_{what}"]) for what in ("images", "labels"))
    return (images.float().unsqueeze(1) / 255 - MEAN) / STANDARD_DEVIATION, labels.long()


def batches(
    images: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end. Every epoch takes the images in a new order, and leaves out the rest that fills no batch.

    The same seed gives the same batches. Raises `ValueError` if the images do not fill one batch.
    """
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batches: batch_size must be from 1 to the {len(images):,} images, not {batch_size!r}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(order) // batch_size * batch_size].split(batch_size):
            yield images[rows], labels[rows]
