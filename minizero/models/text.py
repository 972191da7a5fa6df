"""The text that the GPT reads: bytes, and windows of them."""

from collections.abc import Sequence
from pathlib import Path

import torch

TEXT = Path(__file__).parent.parent / "data" / "text.txt"
LONGEST = 2**30  # bytes: what is longer may have no end


def read_text(path: Path, sequence_length: int) -> torch.Tensor:
    """The bytes of a UTF-8 file, as a tensor. `ValueError` if it is missing, a device, not UTF-8, too short or long."""
    try:
        if path.is_char_device() or path.is_block_device():
            raise ValueError(f"--text: {path} is a device: give a text file")
        with path.open("rb") as file:
            raw = file.read(LONGEST + 1)
        if len(raw) > LONGEST:
            raise ValueError(f"--text: {path} has more than {LONGEST:,} bytes, or no end: give a shorter file")
        raw.decode()
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}: give a text file") from error
    except UnicodeDecodeError as error:  # a ValueError, too
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
