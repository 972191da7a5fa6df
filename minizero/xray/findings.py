"""What an X-ray finds: the step as it is, who holds its peak, what would help, and the cheapest stack that fits."""

import dataclasses
import functools
from typing import Any

import torch

from minizero.xray.case import Case
from minizero.xray.fit import Fit, fit, largest
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

    def __init__(self, case: Case, ranks: int = 1, name: str = "") -> None:
        self.case, self.ranks = case, ranks
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in case.model.parameters()}
        step = "its own loop" if case.loops else f"batch {case.batch_size}, {named(case.make_optimizer)}"
        title = f"{name or type(case.model).__name__}: {case.parameters:,} parameters in {', '.join(sorted(dtypes))}"
        self.title = f"{title}, {step}, {f'as on {case.card}' if case.card else 'as on a CPU'}"
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
        frozen = not all(parameter.requires_grad for parameter in self.case.model.parameters())
        wanted = list(plans(self.ranks, self.case.batch_size, self.case.card, frozen))
        wanted = [plan for plan in wanted if not (self.case.loops and plan.needs_its_loop)]
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

    def largest(self, budget: float) -> dict[str, int]:
        """The largest batch that fits, by the name of a plan: the step as it is, and with recompute if that can be."""
        found = [outcome(self.case, plan) for plan in (Plan(), Plan(recompute=True))]
        return {name_of(row.plan): largest(self.case, budget, row.plan) for row in found if row.result}

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
            "card": self.case.card,
            "notes": sorted(self.case.notes),
            "peak": self.peak,
            "at_peak": self.plain.parts,
            "holders": [dataclasses.asdict(row) for row in self.holders],
            "techniques": rows,
            "fit": found
            and {"budget": budget, "plan": name_of(found.plan), "peak": found.result.peak, "spare": found.spare},
            "curve": curve,
        }


def named(optimizer: Any) -> str:
    """What the report calls an optimizer."""
    kind = optimizer if hasattr(optimizer, "__name__") else type(optimizer)
    return kind.__name__.replace("<lambda>", "an optimizer of its own")


def thinned(curve: list[Any]) -> list[Any]:
    """At most `SAMPLES` samples: the highest of each stretch, so that no peak is lost."""
    stretch = -(-len(curve) // SAMPLES)
    return [max(curve[i : i + stretch], key=lambda sample: sample["total"]) for i in range(0, len(curve), stretch)]
