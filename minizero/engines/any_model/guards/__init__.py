"""What the engines refuse, and say so, since it would otherwise be silently wrong.

    modules.py      a module that cannot be wrapped, or that changed after wrapping; backwards that cannot be right
    optimizers.py   an optimizer that steps the wrong tensors, or needs whole ones; hooks that see a part
    no_sync.py      a gradient that is not averaged yet, and is used
    wrapped.py      what a module can do and an engine cannot
    shards.py       norms of shards, and shapes
    ranks.py        weights, or a step, that are one rank's alone

A reader of the mechanism skips all of this.
"""
