"""What an X-ray finds: the step as it is, who holds its peak, what would help, and the cheapest stack that fits."""

import dataclasses
import functools
from typing import Any

import torch

from minizero.xray.case import Case
from minizero.xray.fit import Fit, fit
from minizero.xray.holders import Row, rows_at_peak
from minizero.xray.lines import LineLedger
from minizero.xray.plan import Plan
from minizero.xray.step import Result
from minizero.xray.techniques import Outcome, costs_of, name_of, outcome, plans

SAMPLES = 2000  # of the curve


class Findings:
    """What one case's step holds. Bytes are of one rank.

    plain: the figures of the step. peak: by category, each category's own maximum, and the joint maximum `total`, as
    the ledger's. phase: in which that is. holders: rows, the largest first, of what is alive then. curve: samples, as
    the ledger's, at most 2,000. fits: after `fit`, the budget and what was found.
    """

    def __init__(self, case: Case, ranks: int = 8, name: str = "") -> None:
        self.case, self.ranks = case, ranks
        self.title = f"{name or type(case.model).__name__}: {case.parameters:,} parameters, batch {case.batch_size}"
        measured = case.measure(Plan(), LineLedger)
        self.plain: Result = measured.result()
        case.found[Plan()] = self.plain
        self.peak = self.plain.peak
        self.holders: list[Row] = rows_at_peak(measured.ledger, case.vocabulary())
        self.curve = thinned(measured.ledger.curve)
        self.phase = max(self.curve, key=lambda sample: sample["total"]).phase
        self.fits: tuple[float, Fit] | None = None

    @functools.cached_property
    def outcomes(self) -> list[Outcome]:
        """A row for each technique. The first use runs them, which takes as long as some thirty steps."""
        wanted = list(plans(self.ranks, self.case.batch_size))
        self.case.run_all(wanted)
        return [outcome(self.case, plan) for plan in wanted]

    @property
    def so_far(self) -> list[Outcome]:
        """The rows, if somebody has asked for them: what is saved contains what was shown."""
        return vars(self).get("outcomes", [])

    def fit(self, budget: float) -> Fit:
        """The cheapest stack of techniques on `ranks` devices of `budget` bytes each."""
        self.fits = budget, fit(self.case, budget, self.ranks)
        return self.fits[1]

    def numbers(self) -> dict[str, Any]:
        """Everything as plain data, fit for JSON."""
        curve = {key: [sample[key] for sample in self.curve] for key in self.curve[0]}
        curve |= {key: [getattr(sample, key) for sample in self.curve] for key in ("phase", "operator", "number")}
        rows = [
            {"name": name_of(row.plan), "costs": costs_of(row.plan), "against": row.against, "remark": row.remark}
            | (dataclasses.asdict(row.result) if row.result else {})
            for row in self.so_far
        ]
        budget, found = self.fits or (None, None)
        return {
            "title": self.title,
            "torch": torch.__version__,
            "parameters": self.case.parameters,
            "ranks": self.ranks,
            "peak": self.peak,
            "at_peak": self.plain.parts,
            "holders": [dataclasses.asdict(row) for row in self.holders],
            "techniques": rows,
            "fit": found
            and {"budget": budget, "plan": name_of(found.plan), "peak": found.result.peak, "spare": found.spare},
            "curve": curve,
        }


def thinned(curve: list[Any]) -> list[Any]:
    """At most `SAMPLES` samples: the highest of each stretch, so that no peak is lost."""
    stretch = -(-len(curve) // SAMPLES)
    return [max(curve[i : i + stretch], key=lambda sample: sample["total"]) for i in range(0, len(curve), stretch)]
