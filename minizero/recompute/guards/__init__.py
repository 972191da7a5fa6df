"""What could make a second run another one than the first, and what stands against it.

    generators.py  against another dropout mask: torch's generators are set back, NumPy's and Python's are refused
    state.py       against modules that a run changes: batch norm counts a batch once, a switch goes back
    mismatch.py    against all that can only be noticed: the error, and words that messages share

A reader of the mechanism can leave them out: replay.py says when each has its turn.
"""
