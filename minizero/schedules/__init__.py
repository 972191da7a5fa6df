"""Schedules: which inputs of a chain to keep, and which to compute again.

chain.py      what a schedule costs: every forward, every kept input, the peak
rules.py      every k-th input, √n, halving, binomial; the best for a budget
optimal.py    the dynamic programme behind the best
measured.py   what each layer of a real chain costs
depth.py      how much deeper a network can be in the same memory
"""

from minizero.schedules.chain import Schedule, Stage, Step, group
from minizero.schedules.rules import binomial, every_k, fit, optimal_schedule, recursive_halving, sqrt_n

__all__ = ["Schedule", "Stage", "Step", "group"]
__all__ += ["binomial", "every_k", "fit", "optimal_schedule", "recursive_halving", "sqrt_n"]
