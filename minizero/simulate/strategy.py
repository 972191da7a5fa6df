"""How a model is trained, and the machine's constants that no datasheet gives."""

import dataclasses

from minizero.cli import DTYPES
from minizero.models.gpt import RECOMPUTE


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a model is trained. batch_size: sequences in one micro-batch of one GPU. stage: of ZeRO; 0 is DDP.

    Other names are as in `Zero3`. Micro-batches are as in `accumulate`: the gradients of all of them are reduced once.
    Raises `ValueError` for what cannot be.
    """

    ranks: int
    stage: int = 3
    batch_size: int = 1
    micro_batches: int = 1
    sharding_factor: int | None = None
    dtype: str = "bfloat16"
    recompute: str = "none"
    flash: bool = False
    offload: bool = False
    reshard_after_forward: bool = True
    prefetch: int = 1
    overlap: bool = True  # False: one stream does everything, as on a CPU

    def __post_init__(self) -> None:
        check_counts(ranks=self.ranks, batch_size=self.batch_size, micro_batches=self.micro_batches)
        if self.micro_batches > 1000:
            raise ValueError(f"micro_batches must be at most 1,000, not {self.micro_batches:,}: each is gone through")
        if self.prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, not {self.prefetch}")
        for name, known in (("stage", (0, 1, 2, 3)), ("dtype", tuple(DTYPES)), ("recompute", RECOMPUTE)):
            if getattr(self, name) not in known:
                words = ", ".join(map(str, known))
                raise ValueError(f"{name} must be one of {words}, not {getattr(self, name)!r}")
        if self.stage < 3 and (self.sharding_factor is not None or self.offload):
            raise ValueError(f"sharding_factor and offload need stage 3, not {self.stage}")
        factor = self.sharding_factor
        if factor is not None and (factor < 1 or self.ranks % factor):
            near = sorted(divisors(self.ranks), key=lambda divisor: abs(divisor - factor))[:3]
            words = ", ".join(map(str, sorted(near)))
            raise ValueError(f"sharding_factor {factor} does not divide {self.ranks} GPUs: try {words}")

    @property
    def shards(self) -> int:
        """How many ranks a unit is sharded over."""
        return 1 if self.stage == 0 else self.sharding_factor or self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the dtype that is computed, gathered and reduced in."""
        return DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants, fitted or measured. efficiency: the share of a GPU's peak that is reached. The others: see step.py."""

    efficiency: float = 0.5
    interference: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.efficiency <= 0 or self.interference < 0 or self.jitter < 0:
            raise ValueError(f"efficiency must be above 0, interference and jitter at least 0, not {self}")


def check_counts(**counts: int) -> None:
    """Raises `ValueError` for what is no whole number of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {count!r}")


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
