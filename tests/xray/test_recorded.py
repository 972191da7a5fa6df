"""A snapshot that PyTorch recorded: its categories are guessed, and nothing in it is run.

A step runs on the CPU, and is written with the stacks that PyTorch records on a GPU. The truth is the ledger's.
"""

import dataclasses
import functools
import pickle
import traceback

import pytest
import torch
from torch.nn import functional as F

from minizero import GPT
from minizero.memory.snapshot import snapshot
from minizero.xray.__main__ import main
from minizero.xray.lines import LineLedger, LineRecorder
from minizero.xray.recorded import read
from tests.support.ledger_gpt import CONFIG

# The stack of each birth. The first is of model.to("cuda"), by which came what is older than the ledger.
MOVED = ("C:\\venv\\site-packages\\torch\\nn\\modules\\module.py", 930, "_apply"), ("C:\\train.py", 9, "<module>")
STACKS = [MOVED]


class StackLedger(LineLedger):
    class recorder_type(LineRecorder):
        def line(self):
            """A place in STACKS in place of the line."""
            stack = [(frame.filename, frame.lineno, frame.name) for frame in reversed(traceback.extract_stack()[:-2])]
            if (node := torch._C._current_autograd_node()) is not None:  # on a GPU a thread of C++, below it no Python
                stack = stack[: [name for _, _, name in stack].index("_engine_run_backward")]
                stack.insert(0, ("??", 0, f"torch::autograd::generated::{type(node).__name__}::apply"))
            STACKS.append(stack)
            return f"{len(STACKS) - 1}:0"


def run(optimizer=torch.optim.AdamW, steps=3, micro=1, keep=False, to_none=True, recompute="none", closure=False):
    """Train for some steps, watched. keep: the losses stay, and with them all graphs."""
    model, kept = GPT(dataclasses.replace(CONFIG, recompute=recompute)), []
    own = optimizer(model.parameters(), lr=0.001)

    def backward():
        x, y = torch.zeros(2, 4, 8, dtype=torch.long)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward(retain_graph=keep)
        kept.extend([loss] * keep)
        return loss

    with StackLedger(model, own) as ledger:
        for _ in range(steps):
            for _ in range(micro - closure):
                backward()
            own.step(backward if closure else None)
            own.zero_grad(to_none)
    return ledger


def recorded(ledger, native=True, older=False, runs_out=False):
    """The ledger's tape as PyTorch records it; and the category of each allocation, in order.

    native: with the frames of C++. older: the record begins after the model. runs_out: of memory, in the last forward.
    """
    whole = pickle.loads(snapshot(ledger.tape, ledger.start))
    trace = [event for event in whole["device_traces"][0][:-1] if not older or "from before" not in str(event)]
    births = [at for at, event in enumerate(trace) if event["action"] == "alloc"]
    truth = {at: trace[at]["category"] for at in births}
    blocks = whole["segments"][0]["blocks"]
    for part in [*trace, *blocks]:
        name = next((frame["filename"] for frame in part["frames"]), "")
        known = STACKS[int(name)] if name.isdigit() else [] if older or not name else MOVED
        known = [frame for frame in known if native or frame[0] != "??"]
        known = [] if part.get("action", "").startswith("free") else known  # PyTorch may know none
        part["frames"] = [dict(zip(("filename", "line", "name"), frame)) for frame in known]
        part.pop("category", None)
    if runs_out:  # then Python lets go of all that it would let go of later: an address is larger than all before
        at = [at for at in births if trace[at]["user_metadata"]["phase"] == "forward"][-30]
        gone = [event for event in trace[at:] if event["action"][:4] == "free" and event["addr"] < trace[at]["addr"]]
        blocks[:] = [block for block in blocks if block["address"] < trace[at]["addr"]]
        max(blocks, key=lambda block: block["size"])["state"] = "active_pending_free"  # another stream reads it
        trace[at:] = [{**trace[at], "action": "oom", "size": 3 << 30, "device_free": 1 << 30}, *gone]
    return pickle.dumps(whole | {"device_traces": [trace]}), truth


SGD = functools.partial(torch.optim.SGD, momentum=0.9)
STEPS = {"optimizer": SGD}, {"micro": 2}, {"to_none": False}, {"keep": True, "steps": 5}, {"recompute": "full"}


@pytest.mark.parametrize("steps", [{}, *STEPS, {"steps": 1}, {"closure": True}])
def test_the_guess_is_right_for_97_percent_of_the_bytes(steps, tmp_path):
    ledger, file = run(**steps), tmp_path / "step.pickle"
    for how in ({}, {"native": False}, {"runs_out": True}):
        content, truth = recorded(ledger, **how)
        file.write_bytes(content)
        found = read(file)
        sizes = {born: found.trace[born]["size"] for born in found.held}
        right = sum(size for born, size in sizes.items() if found.categories[born] == truth[born])
        assert right >= 0.97 * sum(sizes.values()) and "parameters" in found.categories.values()
        assert not [at for at in found.dies if (truth[at], found.categories[at]) == ("activations", "optimizer")]
        assert [steps for _, steps, _ in found.left_over()[:1]] == ([4] if "keep" in steps else [])


def test_the_command_says_that_it_guesses_and_writes_the_categories(tmp_path, capfd):
    (file := tmp_path / "oom.pickle").write_bytes(recorded(run(), older=True, runs_out=True)[0])
    assert main(["--snapshot", str(file), "--output", str(tmp_path)]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "Out of memory in forward" in out and "3.00 GiB asked for, 1.00 GiB free" in out and "gpt.py:" in out
    assert "Who holds it, guessed from stacks" in out and "32% is older" in out and "are not allocated" in out
    whole = pickle.loads((tmp_path / "oom_by_category.pickle").read_bytes())
    told = {event.get("category") for event in whole["device_traces"][0] if event["action"] in ("alloc", "snapshot")}
    assert {"older", "optimizer", "activations", "unknown"} <= told and None not in told
    assert main(["--snapshot", str(tmp_path / "oom_by_category.pickle")]) == 2
    assert "has categories already" in capfd.readouterr().err
