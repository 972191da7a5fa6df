"""What the engines refuse, and says so, since it would otherwise be silently wrong; and cures for others' code.

    released.py     a parameter that is read while it is empty or old
    modules.py      a module that cannot be wrapped, or that changed after wrapping; backwards that cannot be right
    optimizers.py   an optimizer that steps the wrong tensors, or needs whole ones; hooks that see a part
    no_sync.py      a gradient that is not averaged yet, and is used
    wrapped.py      what a module can do and an engine cannot
    norms.py        batch norms in 16 bits
    shards.py       norms of shards, and shapes
    ranks.py        weights, or a step, that are one rank's alone

A reader of the mechanism can leave them out, but for `mark_as_old` and `own_gradient_comes` (optimizers.py), the class
`Released`, and norms.py, which lets batch norms compute in FP32.
"""
