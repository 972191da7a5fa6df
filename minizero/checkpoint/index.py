"""A checkpoint's index, checked as it is read: a disk may have lost a part of it, and a stranger may have written it.

Nothing that it names lies outside of the checkpoint's folder, and nothing but what a save has written is removed.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

KINDS = {"step": int, "saved_by": dict, "data": str, "files": dict, "parameters": dict, "buffers": dict}
KINDS |= {"optimizer": str, "group_of": dict, "groups": list}
DATA = re.compile(r"shards-of-step-\d+-[0-9a-f]{8}")
FILE = re.compile(r"rank-\d+\.safetensors")


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"


def read_index(folder: Path) -> dict[str, Any]:
    """The index of the checkpoint in `folder`; an empty dict if there is none. `ValueError` if it makes no sense."""
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text()) if path.exists() else None
        if index is not None:
            check(index)
        return index or {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no checkpoint's: {error}: give another folder") from error


def check(index: Any) -> None:
    """`ValueError` unless the index has all that `save` writes, of the right types, and no place outside the folder."""
    given = index if isinstance(index, dict) else {}
    if wrong := [name for name, kind in KINDS.items() if type(given.get(name)) is not kind]:
        raise ValueError(f"these are missing, or of another type: {', '.join(wrong)}")
    if not DATA.fullmatch(index["data"]):
        raise ValueError(f"its data are in {index['data']!r}, not in a folder such as shards-of-step-12-9f31c2d4")
    files, groups, ranks = index["files"], index["groups"], index["saved_by"].get("world_size")
    if len(files) != ranks or files.keys() != {file_of(rank) for rank in range(len(files))}:
        raise ValueError(f"of the files of its {ranks} ranks it names {', '.join(sorted(files))}")
    numbers = {name: i for name, i in index["group_of"].items() if type(i) is not int or not 0 <= i < len(groups)}
    if numbers or not all(type(group) is dict for group in groups):
        raise ValueError(f"its {len(groups)} groups of hyperparameters are not all dicts, or lack those of {numbers}")


def remove_all_but(folder: Path, data: str | None) -> None:
    """Remove the shards of older checkpoints, and of saves that a crash ended. data: the folder to keep."""
    for path in folder.glob("shards-of-step-*"):
        if path.name != data and DATA.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            if all(FILE.fullmatch(file.name) for file in path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
