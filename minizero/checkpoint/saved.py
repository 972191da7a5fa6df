"""Checkpoints of sharded training: every rank writes what it holds, and one rename makes it count.

    folder/index.json                                       step, names, shapes, hyperparameters, checksums
    folder/shards-of-step-12-9f31c2d4/rank-0.safetensors    what rank 0 held; one file a rank

1. Every rank writes its data into a new folder, and waits until they are on the disk.
2. When every rank has said so, rank 0 renames a new index over the old one.

A rename happens wholly or not at all. So a crash at any moment leaves the old checkpoint or the new one. It may leave
files besides, which the next save removes. What is in the files, and how another number of ranks reads it, stands in
resharding.py. Pillai et al., 2014, "All file systems are not created equal", on what may reach a disk in which order.
"""

import json
import operator
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minizero.checkpoint.index import file_of, read_index, remove_all_but
from minizero.checkpoint.resharding import (
    check_names,
    check_shards,
    decided,
    fill,
    hyperparameters,
    look_up,
    names_of,
    tensors_to_write,
)
from minizero.engines.any_model.wrapped import Wrapped
from minizero.ranks.agreement import words_of_all
from minizero.ranks.comm import Comm

# What a rank may say instead of a result.
FAILED = "failed: "
NOTHING = "no checkpoint"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. Every rank raises it, and it names the rank at fault."""


class NoCheckpoint(CheckpointError):
    """Nothing has been saved in this folder yet: start training from the beginning."""


@torch.no_grad()
def save(folder: str | os.PathLike, model: Wrapped, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put the state after `step` steps into `folder`, in place of the checkpoint there. Collective.

    It saves the FP32 parameters, rank 0's buffers, and the optimizer's states and hyperparameters. It does not save
    gradients, random generators, or a scheduler's own state. All ranks must see the folder, and nothing else may save
    into it. No rank may take longer to write than `comm.timeout`.
    `CheckpointError` on every rank if one of them cannot write, or if a learning rate, say, differs between ranks: then
    the checkpoint from before still stands. Nothing is removed but what a save has written.
    """
    if (step := operator.index(step)) < 0:
        raise ValueError(f"checkpoint: step must be a whole number from 0, not {step}")
    about = names_of(model, optimizer)  # collective
    folder, comm = Path(folder), model.comm
    check_alike(comm, decided(model, optimizer, about["groups"]))

    def begin() -> str | None:
        if comm.rank > 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        remove_all_but(folder, read_index(folder).get("data"))
        name = f"shards-of-step-{step}-{secrets.token_hex(4)}"
        (folder / name).mkdir()
        return name

    data = folder / together(comm, f"save of step {step}", begin)[0]
    file, new = data / file_of(comm.rank), folder / "index.json.new"

    def write() -> str:
        if not data.is_dir():
            raise FileNotFoundError(f"{data}, made by rank 0, is not here: give all ranks a folder that all can see")
        save_file(tensors_to_write(model, optimizer), file)
        flush(file)
        return checksum(file)

    checksums = together(comm, "write", write, file)

    def commit() -> None:
        if comm.rank == 0:
            by = {"stage": type(model).__name__, "world_size": comm.size}
            files = {file_of(rank): crc for rank, crc in enumerate(checksums)}
            index = {"step": step, "saved_by": by, "data": data.name, "files": files} | about
            text = json.dumps(index, indent=1, default=lambda number: number.item())  # a learning rate may be a tensor
            new.write_text(text)
            # What the new index points at must be on the disk before the rename is.
            for path in (data, new, folder):
                flush(path)
            os.replace(new, folder / "index.json")
            flush(folder)
            remove_all_but(folder, data.name)

    together(comm, "commit", commit, new)


@torch.no_grad()
def load(folder: str | os.PathLike, model: Wrapped, optimizer: torch.optim.Optimizer) -> int:
    """Set model and optimizer to what was saved in `folder`, and return its step. Collective.

    World size, stage, sharding factor, `units`, `group_by` and `dtype` may differ from those of `save`. The optimizer
    need not have made a step. `NoCheckpoint` if nothing was saved. `CheckpointError` if the checkpoint is damaged, if
    it is of another model or optimizer, or if only some ranks see it. Every rank raises, before anything is changed.
    """
    about = names_of(model, optimizer)  # collective
    folder, comm = Path(folder), model.comm
    index: dict[str, Any] = {}

    def look() -> str:
        index.update(read_index(folder))
        return f"step {index['step']} in {index['data']}" if index else NOTHING

    seen = together(comm, "load", look)
    if len(set(seen)) > 1:
        rank = next(rank for rank, what in enumerate(seen) if what != seen[0])
        raise CheckpointError(
            f"checkpoint: rank {comm.ranks[0]} sees {seen[0]} in its folder, rank {comm.ranks[rank]} {seen[rank]}: "
            f"give all ranks one folder that all can see (here it is {folder})"
        )
    if seen[0] == NOTHING:
        raise NoCheckpoint(f"checkpoint: nothing has been saved in {folder}")
    files = [folder / index["data"] / name for name in index["files"]]
    ready: dict[str, Any] = {}

    def check() -> None:
        check_names(index, about)
        for file in files[comm.rank :: comm.size]:  # the ranks divide the work
            if checksum(file) != index["files"][file.name]:
                raise ValueError(f"{file} is damaged: its checksum is not the one that was written down")

    def plan() -> None:
        ready.update(groups=hyperparameters(index, about, optimizer), stored=look_up(files))
        check_shards(ready["stored"], model)

    def read() -> None:
        fill(model=model, optimizer=optimizer, **ready)

    for what in (check, plan, read):  # nothing is changed before all ranks know that they can go on
        together(comm, what.__name__, what)
    return index["step"]


def together(comm: Comm, what: str, do: Callable[[], str | None], file: Path | None = None) -> list[str]:
    """Call `do()` on every rank, and return the words that each rank's call returned. If one fails, all raise.

    `do` must not communicate: a rank whose call fails would leave the others waiting. file: what it writes; the error
    of a full disk does not name it.
    """
    error = None
    try:
        said = do() or ""
    except Exception as caught:
        where = f": {file}" if file and not isinstance(caught, ValueError) else ""
        error, said = caught, f"{FAILED}{str(caught) or type(caught).__name__}{where}"
    everyone = words_of_all(comm, f"checkpoint {what}", said)
    for rank, words in enumerate(everyone):
        if words.startswith(FAILED):
            raise CheckpointError(f"checkpoint {what}: rank {comm.ranks[rank]} {words}") from error
    return everyone


def check_alike(comm: Comm, said: dict[str, str]) -> None:
    """`CheckpointError` that names what the ranks say differently. Collective."""
    first: dict[str, tuple[int, str]] = {}
    for rank, words in enumerate(words_of_all(comm, "checkpoint decided", json.dumps(said))):
        for what, value in json.loads(words).items():
            other, theirs = first.setdefault(what, (rank, value))
            if value != theirs:
                raise CheckpointError(
                    f"checkpoint: {what} is {theirs} on rank {comm.ranks[other]}, {value} on rank {comm.ranks[rank]}: "
                    "let all ranks decide alike, say by a loss that is averaged over them"
                )


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):  # a part at a time: a file may be larger than the memory
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"
