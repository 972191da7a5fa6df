"""A ledger's tape as a memory snapshot of PyTorch: a file that pytorch.org/memory_viz opens, in the browser alone.

On a GPU `torch.cuda.memory._dump_snapshot` writes such a file. This one needs no GPU, since its events are the tape's:

alloc, free      each birth, resize and death, with the bytes of the storage
category         the ledger's: the viewer gives each its colour
frames           the user's line, if the recorder has noted it (xray/lines.py), and the module
user_metadata    module, operator, phase and shape, as text below the curve

"Active Memory Timeline" is the ledger's curve. "Allocator State History" tells nothing: the addresses are made up.
"""

import functools
import pickle
from typing import Any

from minizero.memory.tape import Tape, moments

BASE = 2**40  # the first address: as large as a GPU's
# If there are categories and none is called "unknown", the viewer stops with an error. It draws no event of this kind.
LAST = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}


def snapshot(tape: Tape, start: int = 0) -> bytes:
    """The tape from `start` on, as a pickle."""
    trace: list[dict[str, Any]] = []
    alive: dict[int, dict[str, Any]] = {}  # by the record's id: the event that allocated it, in the order of addresses
    top = BASE
    told_once = functools.cache(told)  # a pickle has an object once, however often it is written
    for number, now in enumerate(moments(tape, start)):
        for record in [now.changed] if number else [held[0] for held in now.alive.values()]:  # first what existed
            if record.category == "host":  # the host's memory is not the device's
                continue
            if event := alive.pop(id(record), None):  # it has died, or it has another size and moves
                trace += ({**event, "action": action} for action in ("free_requested", "free_completed"))
            _, size, operator = now.alive.get(id(record), (record, 0, None))
            if size:
                birth = getattr(record, "birth", None)
                module, line, shape = (birth.module, birth.line, birth.shape) if birth else (record.module, "", None)
                why = told_once(record.category or "temporary", module, str(operator or ""), record.phase, shape, line)
                alive[id(record)] = {"action": "alloc", "addr": top, "size": size, "stream": 0, **why}
                trace.append(alive[id(record)])
                top += size
    # One piece of the card with all addresses. They only grow, so each allocation is a block of its own.
    held = {event["addr"]: event["size"] for event in alive.values()}
    blocks = []
    for event in (event for event in trace if event["action"] == "alloc"):
        size, state = event["size"], "active_allocated" if event["addr"] in held else "inactive"
        blocks.append(dict(address=event["addr"], size=size, requested_size=size, state=state, frames=event["frames"]))
    sizes = {"total_size": top - BASE, "allocated_size": sum(held.values())}
    segment = {"device": 0, "address": BASE, "stream": 0, "segment_pool_id": (0, 0), "frames": [], "blocks": blocks}
    whole = {"segments": [segment | sizes], "device_traces": [[*trace, LAST]]}
    return pickle.dumps(whole, protocol=4)  # the viewer refuses 5, which is Python 3.14's own choice


def told(category: str, module: str, operator: str, phase: str, shape: Any, line: str) -> dict[str, Any]:
    """What the viewer shows of an allocation: its colour, a frame, and lines of text."""
    file, _, number = line.rpartition(":")
    frame = {"filename": file or operator or "from before", "line": int(number or 0), "name": module or phase}
    text = {"category": category, "module": module, "operator": operator, "phase": phase, "shape": str(shape or "")}
    return {"category": category, "frames": [frame], "user_metadata": {key: word for key, word in text.items() if word}}
