"""Constants fitted on a part of what was published. They predict the rest.

    minimise over the constants c    Σ (ln simulated(c) - ln published)²    over the rows that may be fitted

by Levenberg's and Marquardt's damped Gauss-Newton steps. The constants are positive, so their logarithms are fitted.
A figure that a fit looked at is *fitted*. Only a figure that it did not look at is *predicted*.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minizero.simulate.clusters import Cluster
from minizero.simulate.published import PUBLICATIONS, RATIO, TOKENS, Publication, Row
from minizero.simulate.shapes import model
from minizero.simulate.step import Prediction, simulate
from minizero.simulate.strategy import Constants, Strategy

START = {"efficiency": 0.45, "interference": 0.3, "jitter": 0.003, "network": 0.3}


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float] | np.ndarray) -> np.ndarray:
    """The x near `start` for which the sum of squared residuals is least. Derivatives are differences."""
    x = np.array(start, dtype=float)
    damping = 1e-3  # small: Gauss and Newton's step; large: a short step straight down
    r = residuals(x)
    for _ in range(40):
        shifts = 1e-4 * np.eye(len(x))
        jacobian = np.stack([(residuals(x + shift) - r) / 1e-4 for shift in shifts], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ r
        # Damp more until the step helps.
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(x)), -slope)
            new = residuals(x + step)
            if new @ new < r @ r:
                break
            damping *= 10
        else:
            return x
        done = np.abs(step).max() < 1e-5
        x, r, damping = x + step, new, damping / 10
        if done:
            return x
    return x


@dataclasses.dataclass(frozen=True)
class Fit:
    """The fitted constants of a publication.

    efficiencies: by kind of row, see `kind`. shared: the other constants. values: what each row is when simulated.
    """

    publication: Publication
    efficiencies: Mapping[str, float]
    shared: Mapping[str, float]
    values: tuple[float, ...]

    def errors(self, fitted: bool) -> list[float]:
        """simulated / published - 1, of the rows that were fitted, or of those that were not."""
        return [x / row.value - 1 for row, x in zip(self.publication.rows, self.values) if row.fitted == fitted]

    def run(self, name: str, plan: Strategy) -> Prediction:
        """Simulates another plan with these constants. Raises `ValueError` for a model that has no efficiency."""
        row = Row(name, plan, 0, False, precision="float32" if plan.dtype == "float32" else "")
        key = kind(self.publication, row)
        if key not in self.efficiencies:
            raise ValueError(f"{self.publication.name} has no efficiency for {key}: {', '.join(self.efficiencies)}")
        return run(self.publication.cluster, name, plan, self.efficiencies[key], self.shared)


shape = functools.cache(model)  # a known model is built once: a fit simulates it hundreds of times


def kind(publication: Publication, row: Row) -> str:
    """Rows of one kind share an efficiency: those of one model and precision; all rows if the network is fitted."""
    if "network" in publication.shared:
        return "all"
    return f"{row.model} {row.precision}".strip()


def run(cluster: Cluster, name: str, plan: Strategy, efficiency: float, shared: Mapping[str, float]) -> Prediction:
    """Simulates one step. shared: constants; `network` is the share of the network's bandwidth that is reached."""
    constants = Constants(efficiency, shared.get("interference", 0), shared.get("jitter", 0))
    return simulate(shape(name), cluster.with_network(shared.get("network", 1)), plan, constants)


def value(publication: Publication, row: Row, efficiency: float, shared: Mapping[str, float]) -> float:
    """The figure of a row when simulated, in the row's unit."""
    step = run(publication.cluster, row.model, row.plan, efficiency, shared)
    if row.unit == RATIO:
        assert row.against is not None
        return step.tflops / run(publication.cluster, row.model, row.against, efficiency, shared).tflops
    return step.tokens_per_second if row.unit == TOKENS else step.tflops


@functools.cache
def fit(name: str) -> Fit:
    """The fit of one publication. Constants that it carries over come from the fit of llm-foundry."""
    publication = PUBLICATIONS[name]
    return fit_to(publication, {constant: fit("llm-foundry").shared[constant] for constant in publication.carried})


def fit_to(publication: Publication, carried: Mapping[str, float]) -> Fit:
    """The fit of any publication. carried: constants that are given."""
    kinds = list(dict.fromkeys(kind(publication, row) for row in publication.rows))
    looked_at = [row for row in publication.rows if row.fitted]

    def constants(x: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
        numbers = np.exp(x).tolist()
        return dict(zip(kinds, numbers)), dict(carried) | dict(zip(publication.shared, numbers[len(kinds) :]))

    def values(x: np.ndarray, rows: Sequence[Row]) -> list[float]:
        efficiencies, shared = constants(x)
        return [value(publication, row, efficiencies[kind(publication, row)], shared) for row in rows]

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(values(x, looked_at)) - np.log([row.value for row in looked_at])

    start = [START["efficiency"]] * len(kinds) + [START[constant] for constant in publication.shared]
    found = least_squares(residuals, np.log(start))
    return Fit(publication, *constants(found), tuple(values(found, publication.rows)))
