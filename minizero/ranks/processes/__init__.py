"""Ranks that are processes, of one machine or of many: what `World` does with threads, `torchrun` does with these.

    torchrun.py    how they meet, and leave each other
    transport.py   their messages, which `torch.distributed` carries; tags keep apart what does not belong together
    watch.py       against ranks that disagree, and would wait for each other for ever

A reader of the mechanism can leave them out: threads.py offers the same to a `Comm`.
"""
