"""What the tests of checkpoints share: a wrapped model with its optimizer, and all that there is to compare."""

import json

import torch

from minizero import GPT, all_gather
from tests.support.helpers import SMALL


def wrap(comm, stage, make=lambda: GPT(SMALL), optimizer=torch.optim.AdamW, dtype=None, factor=None, **options):
    """A wrapped model and its optimizer."""
    sharding = {} if factor is None else {"sharding_factor": factor}
    module = make()
    units = [module.unused] if hasattr(module, "unused") else None
    model = stage(module, comm, dtype=dtype, units=units, **sharding)
    return model, optimizer(model.parameters(), **({"lr": 1e-3} | options))


def full_states(model, optimizer):
    """Everything there is, in full: parameters, buffers, and the optimizer's states by the parameters' names."""
    found = model.gather_state_dict()
    for unit in model.units:
        start, kinds = 0 if unit.unsharded else unit.comm.rank * unit.master.numel(), {}
        for shard in unit.shards:
            state = optimizer.state.get(shard, {}) if start < unit.layout.numel else {}  # beyond it is padding
            for kind, value in state.items():
                long = torch.is_tensor(value) and value.dim() and value.shape == shard.shape
                kinds[kind] = "long" if long or kinds.get(kind) == "long" else float(value)
            start += shard.numel()
        everyone = [json.loads(words) for words in unit.comm.transport.exchange(json.dumps(kinds))]
        for kind in sorted(set().union(*everyone)):
            (value,) = {kinds[kind] for kinds in everyone if kind in kinds}
            if value == "long":
                states = [optimizer.state.get(shard, {}).get(kind, torch.zeros_like(shard)) for shard in unit.shards]
                mine = torch.cat([state.reshape(-1) for state in states])
                whole = mine if unit.unsharded else all_gather(mine, unit.comm)
                found |= {f"{name}/{kind}": v.clone() for name, v in zip(unit.layout.names, unit.layout.views(whole))}
            else:
                found |= {f"{name}/{kind}": torch.tensor(value, dtype=torch.float64) for name in unit.layout.names}
    return found


def scrambled():
    """A model whose values are not those that will be loaded."""
    model = GPT(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def error_of(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return error
    return None
