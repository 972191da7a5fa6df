"""Ranks that talk: how N workers exchange tensors, and the collectives made of that.

To be read first:

comm.py         what a rank sees of the others: send, recv, send_recv, split
collectives.py  the rings: all-gather, reduce-scatter, all-reduce; barrier
combining.py    what a ring does with a chunk that comes in; a mean in 16 bits
tree.py         broadcast
world.py        N ranks as threads of one process, that end together
one_of_many.py  one rank of N without the others, to count bytes

To measure them:

launch.py       a function on N processes
timing.py       how long a message takes: t = α + n/β

What stands behind them:

errors.py       the three errors that end a run
arguments.py    what a collective refuses before anything is sent
agreement.py    all ranks say the same, or all raise
transport.py    what threads and processes must offer
threads.py      the transport of threads
random_numbers.py  a rank that is a thread draws as a process of its own
processes/      the transport of processes: how they meet, talk, and find out that they disagree
"""
