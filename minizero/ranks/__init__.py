"""Ranks that talk: how N workers exchange tensors, and the collectives made of that.

comm.py         what a rank sees of the others: send, recv, send_recv, split
collectives.py  the rings: all-gather, reduce-scatter, all-reduce; broadcast, barrier
world.py        N ranks as threads of one process, that end together
processes.py    the ranks of torchrun
watch.py        who sees it when processes disagree
"""
