"""No crash, full disk or damaged file leaves anything but a whole checkpoint, or an error on every rank."""

import itertools
import json
import os
import re
import sys
import threading

import pytest
import torch
from torch import nn

from minizero import DDP, CollectiveMismatch, RankFailed, Zero1, Zero3
from minizero.checkpoint import CheckpointError, NoCheckpoint, load, save, saved
from tests.support.checkpoints import error_of, full_states, wrap
from tests.support.helpers import run


class Tiny(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Counts(Tiny):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))


class Frozen(Tiny):
    def __init__(self):
        super().__init__()
        self.bias.requires_grad_(False)


def tiny_save(comm, folder, value):
    """A checkpoint in which all is `value`."""
    model, optimizer = wrap(comm, Zero3, Tiny)
    with torch.no_grad():
        for shard in model.parameters():
            shard.fill_(value)
            optimizer.state[shard] = {"step": torch.tensor(float(value)), "exp_avg": shard.clone()}
    save(folder, model, optimizer, value)


def tiny_load(comm, folder):
    """The value of that checkpoint, which must be whole."""
    model, optimizer = wrap(comm, Zero3, Tiny)
    value = load(folder, model, optimizer)
    states = full_states(model, optimizer)
    assert len(states) == 6 and all((tensor == value).all() for tensor in states.values())
    return value


class Crash(BaseException):
    pass


class Crashing:
    """The machine stops before the n-th operation on the file system; the hook cannot be taken out again."""

    def __init__(self):
        self.left, self.log = None, []
        sys.addaudithook(self.hook)

    def hook(self, event, args):
        if self.left is not None and event.split(".")[0] in ("os", "open", "shutil"):
            if threading.current_thread().name.startswith("rank ") and not str(args[0]).endswith(".py"):
                self.left -= 1
                self.log.append((event, str(args[:2])))
                if self.left < 0:
                    raise Crash(event)


@pytest.mark.slow
def test_a_crash_before_any_operation_leaves_a_whole_checkpoint(tmp_path):
    run(2, tiny_save, tmp_path, 1)
    crashing, found = Crashing(), []
    for operation in itertools.count():
        run(2, tiny_save, tmp_path, 1)
        (tmp_path / "shards-of-step-0-0123abcd").mkdir()
        (tmp_path / "shards-of-step-0-0123abcd" / "rank-0.safetensors").write_text("over")
        crashing.left, crashing.log = operation, []
        try:
            run(2, tiny_save, tmp_path, 2)
            break
        except RankFailed as error:
            assert isinstance(error.__cause__, Crash)
        finally:
            crashing.left = None
        found += run(2, tiny_load, tmp_path)[:1]
    assert sum(event == "os.rename" for event, _ in crashing.log) == 1
    assert found == [1] * found.count(1) + [2] * found.count(2)
    assert found.count(1) > 10 and found.count(2) > 5
    assert len(list(tmp_path.iterdir())) == 2  # the index, and one folder


def test_all_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    log = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (fsync(file), log.append(os.fstat(file).st_ino)))
    monkeypatch.setattr(os, "replace", lambda *paths: (log.append(os.path.basename(paths[1])), replace(*paths)))
    run(2, tiny_save, tmp_path, 1)
    (data,) = tmp_path.glob("shards*")
    before, after = log[: log.index("index.json")], log[log.index("index.json") + 1 :]
    assert {path.stat().st_ino for path in [*data.iterdir(), data, tmp_path, tmp_path / "index.json"]} <= {*before}
    assert after == [tmp_path.stat().st_ino]


@pytest.mark.parametrize("world_size, at", [(2, 0), (3, 1)])
def test_a_rank_that_cannot_write_fails_all_and_the_old_one_stands(world_size, at, tmp_path, monkeypatch):
    full, there, write = [], [], saved.save_file

    def save_file(tensors, path):
        there.append(len([*tmp_path.glob("shards*")]))
        if threading.current_thread().name in full:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(saved, "save_file", save_file)
    run(world_size, tiny_save, tmp_path, 1)
    full.append(f"rank {at}")
    for rank, error in enumerate(run(world_size, lambda comm: error_of(tiny_save, comm, tmp_path, 2))):
        words = f"rank {at} failed: .*No space left on device: /.*rank-{at}.safetensors"
        assert isinstance(error, CheckpointError) and re.search(words, str(error))
        assert isinstance(error.__cause__, OSError) == (rank == at)
    assert run(world_size, tiny_load, tmp_path) == world_size * [1]
    full.clear()
    run(world_size, tiny_save, tmp_path, 3)
    # What had failed is gone before anything new is written: the disk may be full.
    assert there == world_size * [1] + 2 * world_size * [2] and len(list(tmp_path.iterdir())) == 2
    assert run(world_size, tiny_load, tmp_path) == world_size * [3]
    (tmp_path / "file").write_text("")
    errors = run(world_size, lambda comm: error_of(tiny_save, comm, tmp_path / "file", 2))
    assert all(isinstance(e, CheckpointError) and "rank 0 failed: [Errno 17] File exists" in str(e) for e in errors)


def edited(change):
    def damage(index, file):
        saved = json.loads(index.read_text())
        change(saved)
        index.write_text(json.dumps(saved))

    return damage


DAMAGES = {
    "missing": (lambda index, file: file.unlink(), "rank-1.safetensors"),
    "truncated": (lambda index, file: file.write_bytes(file.read_bytes()[:-1]), "rank-1.safetensors"),
    "flipped": (lambda index, file: file.write_bytes(file.read_bytes()[:-1] + b"!"), "rank-1.safetensors"),
    "index": (lambda index, file: index.write_text(index.read_text()[:-20]), "index.json is damaged"),
    "a list": (edited(lambda saved: saved.update(groups={})), "these are missing, or of another type: groups"),
    "step": (edited(lambda saved: saved.update(step="1")), "these are missing, or of another type: step"),
    "part": (edited(lambda saved: (saved.pop("groups"), saved.pop("step"))), "or of another type: step, groups"),
    "data": (
        edited(lambda saved: saved.update(data="../elsewhere")),
        "its data are in '../elsewhere', not in a",
    ),
    "place": (edited(lambda saved: saved["files"].update({"../rank-0": "0"})), "of its 2 ranks it names [.][.]/rank-0"),
    "group": (edited(lambda saved: saved["group_of"].update(weight=7)), "lack those of .*weight.*7"),
    "kind": (edited(lambda saved: saved["groups"][0].update(lr="fast")), "lr is 'fast' in the checkpoint, and 0"),
    "pair": (edited(lambda saved: saved["groups"][0].update(betas=[0.9])), r"hyperparameter betas is \[0.9\]"),
    "words": (edited(lambda saved: saved["groups"][0].update(betas=["a", "b"])), "hyperparameter betas is .'a', 'b'."),
    "incomplete": (
        edited(lambda saved: saved["files"].pop("rank-1.safetensors")),
        "2 ranks it names rank-0.safe",
    ),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_on_every_rank(how, tmp_path):
    run(2, tiny_save, tmp_path, 1)
    (data,) = tmp_path.glob("shards*")
    damage, words = DAMAGES[how]
    damage(tmp_path / "index.json", data / "rank-1.safetensors")

    def job(comm):
        model, optimizer = wrap(comm, Zero3, Tiny)
        return error_of(load, tmp_path, model, optimizer), model.gather_state_dict()

    for error, state in run(3, job):
        assert type(error) is CheckpointError and re.search(words, str(error))
        assert all((tensor == 0).all() for tensor in state.values())  # nothing was loaded


def test_only_what_a_save_has_written_is_removed(tmp_path):
    run(1, tiny_save, tmp_path, 1)
    old = json.loads((tmp_path / "index.json").read_text())["data"]
    names = ("shards-of-step-by-step/rank-0.safetensors", "shards-of-step-3-0123abcd/thesis.tex")
    kept = [tmp_path / name for name in (*names, "shards-of-step-4-0123abcd")]  # the last is no folder
    for file in kept:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    run(1, tiny_save, tmp_path, 2)
    assert all(file.read_text() == "mine" for file in kept) and not (tmp_path / old).exists()
    (tmp_path / "index.json").write_text("{}")
    (error,) = run(1, lambda comm: error_of(tiny_save, comm, tmp_path, 3))
    assert "index.json is damaged, or no checkpoint's" in str(error) and (tmp_path / "index.json").read_text() == "{}"


LOADS = {  # what every rank is told, and in what the load differs from the save
    "parameters that the checkpoint has not: 0.bias, 0.weight": {"make": lambda: nn.Sequential(Tiny())},
    r"weight has shape \(3, 3\) in": {"make": lambda: nn.Linear(3, 4)},
    "buffers that the checkpoint has not: mean": {"make": Counts},
    "optimizer's parameters of the checkpoint .*: bias": {"make": Frozen},
    "is of AdamW, not Adam": {"optimizer": torch.optim.Adam},
    "nothing has been saved in .*nowhere": {"folders": ("nowhere", "nowhere")},
    "rank 0 sees step 1 .*, rank 1 no checkpoint: give all ranks one folder": {"folders": ("tiny", "nowhere")},
}


@pytest.mark.parametrize("words", LOADS)
def test_what_does_not_fit_is_named(words, tmp_path):
    run(2, tiny_save, tmp_path / "tiny", 1)

    def attempt(comm, make=Tiny, optimizer=torch.optim.AdamW, folders=("tiny", "tiny")):
        model, optimizer = wrap(comm, Zero1, make, optimizer)
        error = error_of(load, tmp_path / folders[comm.rank], model, optimizer)
        assert not optimizer.state
        return error

    for error in run(2, attempt, **LOADS[words]):
        assert type(error) is (NoCheckpoint if "nothing" in words else CheckpointError) and re.search(words, str(error))


def test_what_cannot_be_saved_is_named(tmp_path):
    def bad_saves(comm):
        model, optimizer = wrap(comm, Zero3, Tiny)
        foreign = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        whole, adafactor = wrap(comm, DDP, lambda: nn.Linear(8, 8), torch.optim.Adafactor)
        whole(torch.ones(1, 8)).sum().backward()
        adafactor.step()
        rates = wrap(comm, Zero3, Tiny, lr=0.1 * 2**comm.rank)
        for arguments, kind, words in [
            ((tmp_path, model.module, optimizer, 1), TypeError, "must be wrapped"),
            ((tmp_path, model, foreign, 1), ValueError, "from this wrapped model's parameters()"),
            ((tmp_path, whole, adafactor, 1), CheckpointError, "Adafactor keeps for weight a row_var"),
            ((tmp_path / f"{min(comm.rank, 1)}", model, optimizer, 1), CheckpointError, "rank 1 failed"),
            ((tmp_path, model, optimizer, comm.rank), CollectiveMismatch, "step 0"),
            ((tmp_path, *rates, 1), CheckpointError, "lr of group 0 is 0.1 on rank 0, 0.2 on rank 1: let all ranks"),
        ]:
            error = error_of(save, *arguments)
            assert isinstance(error, kind) and words in str(error)

    run(3, bad_saves)
