"""The text that the GPT reads: bytes, and windows of them."""

from collections.abc import Sequence
from pathlib import Path

import torch

TEXT = Path(__file__).parent.parent / "data" / "text.txt"


def read_text(path: Path, sequence_length: int) -> torch.Tensor:
    """The bytes of a UTF-8 file, as a tensor. Raises `ValueError` if the file is missing, not UTF-8 or too short."""
    try:
        raw = path.read_bytes()
        raw.decode()
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text: {path} is not UTF-8 (byte {error.start}): convert it, or give another file"
        ) from error
    if len(raw) <= sequence_length:
        raise ValueError(
            f"--text: {path} has {len(raw):,} bytes, one sequence needs {sequence_length + 1:,}: "
            "give a longer text or a smaller --sequence-length"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def windows(text: torch.Tensor, starts: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y, each (starts, length). x holds the bytes from each start on, y the byte that follows each of them."""
    rows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]
