"""Time and memory on clusters that nobody here owns.

    clusters.py    GPUs, links, hosts: constants with their sources; what a collective costs on them
    shapes.py      models as units: parameters, FLOPs, activations
    strategy.py    how a model is trained
    step.py        one step as a timeline of two streams
    peak.py        the most that a GPU holds during one step
    remedies.py    what to try if a plan does not fit
    search.py      the best plan for a model and a cluster, and the frontier of memory against speed
    published.py   others' figures, and how they were made
    fits.py        constants fitted on some of these figures, and the others predicted
    machine.py     constants measured on the machine at hand, and its own steps predicted
    tables.py      tables and pictures

`python -m minizero.simulate --help`.
"""

from minizero.simulate.clusters import CLUSTERS, GPU, GPUS, Cluster, Link
from minizero.simulate.shapes import MODELS, Model, gpt, model, t5
from minizero.simulate.step import Prediction, simulate
from minizero.simulate.strategy import Constants, Strategy

__all__ = [
    "CLUSTERS",
    "GPU",
    "GPUS",
    "MODELS",
    "Cluster",
    "Constants",
    "Link",
    "Model",
    "Strategy",
    "Prediction",
    "gpt",
    "model",
    "simulate",
    "t5",
]
