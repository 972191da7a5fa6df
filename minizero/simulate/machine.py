"""The network that `python -m minizero.lab` measured, in place of a data sheet's."""

import dataclasses
import json
from pathlib import Path

from minizero.simulate.clusters import Cluster, Link


def with_measured(cluster: Cluster, file: Path) -> Cluster:
    """The cluster with the link that `python -m minizero.lab` measured. Our ring's, since `minizero.train` sends by it.

    Ranks of one host measured the link inside, those of several the network: each rank of a host has a part of its β.
    `ValueError` for a file that the lab did not write.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        ranks, on_a_host, its = found["ranks"], found["ranks_per_host"], found["operations"]["all-gather"]["our ring"]
        link = Link(
            float(its["alpha"]), float(its["beta"]), f"measured with {int(ranks)} ranks, {int(on_a_host)} a host"
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--measured {file}: {error}: give the lab.json that python -m minizero.lab wrote") from error
    if ranks == on_a_host:
        return dataclasses.replace(cluster, inside=link, base_latency=0.0)
    network = dataclasses.replace(link, bandwidth=link.bandwidth / on_a_host)
    return dataclasses.replace(cluster, between=network, base_latency=0.0)
