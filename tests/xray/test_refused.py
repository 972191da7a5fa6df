"""What cannot be run is refused in words, with the user's line; in a table it is a row with the reason."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.xray.case import case_of
from minizero.xray.plan import Plan
from minizero.xray.techniques import outcome
from tests.support.xray_cases import LSTM, tokens


class Does(nn.Module):
    """A layer, a head, and what is done to their results; with `words`, the first layer is a table of them."""

    def __init__(self, does, words=0):
        super().__init__()
        self.body, self.head, self.does = nn.Embedding(words, 8) if words else nn.Linear(8, 8), nn.Linear(8, 50), does

    def forward(self, x, *others):
        return self.does(self, x, *others)


class Rows(nn.Embedding):
    def forward(self, words):
        return super().forward(words).mean()


class TimeFirst(LSTM):
    def __init__(self):
        super().__init__()
        self.lstm.batch_first = False


def lbfgs():
    model, x = Does(lambda self, x: self.body(x).mean()), torch.ones(3, 8)
    optimizer = torch.optim.LBFGS(model.parameters())
    return model, lambda: optimizer.step(lambda: model(x))


def outside():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer)
    model.forward = type("Outside", (), {"__call__": lambda _, x: layer(x).sum()})()  # nobody copies a class
    return model, torch.ones(3, 8)


def in_a_dict():
    model = nn.Linear(8, 8)
    KEPT["optimizer"] = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(3, 8)).sum().backward()
        KEPT["optimizer"].step()

    return model, step


STUDENT = nn.Linear(8, 8)
ADAM = torch.optim.Adam(STUDENT.parameters())


def step_of_globals():
    STUDENT(torch.ones(3, 8)).sum().backward()
    ADAM.step()


def two():
    model, optimizer = nn.Linear(8, 8), torch.optim.Adam(STUDENT.parameters())

    def step():
        STUDENT(model(torch.ones(3, 8))).sum().backward()
        optimizer.step()

    return model, step


def does(function, *inputs, words=0):
    return lambda: (Does(function, words), inputs or (torch.ones(3, 8),))


def sparse(self, x):
    return torch.sparse.mm(x, self.body.weight).mean()


def capped(self, x, y):
    return F.cross_entropy(self.head(self.body(x)).tanh(), y)


def graph(self, x, edges):
    return self.body(x)[edges[1]].mean()


def summed(self, x, y):
    logits = self.head(self.body(x))
    return F.cross_entropy(logits, y) + logits.logsumexp(-1).mean()


def smoothed(self, x, y):
    return F.cross_entropy(self.head(self.body(x)), y, label_smoothing=0.1)


KEPT = {}  # a global that nobody copies
VALUE, HERE, MAKE = "it looks at a tensor's value", r".*\(test_refused\.py:\d+\)", "must return a model and its inputs"
CAPPED = does(capped, torch.ones(3, 8), torch.zeros(3, dtype=torch.long))
WORDS = torch.arange(9), torch.arange(9)
REFUSED = [
    (does(lambda self, x: self.body(x * x.sum().item()).mean()), Plan(), VALUE + HERE),
    (does(lambda self, x: self.body(x if x.sum() > 0 else -x).mean()), Plan(), VALUE + HERE),
    (does(lambda self, x: self.body(x[x.sum(1) > 0]).mean()), Plan(), "a shape depends on a tensor's values" + HERE),
    (lbfgs, Plan(), VALUE + HERE),
    (does(lambda self, x: torch.cat([self.body(x), self.head(x)])), Plan(), "must match except in dimension" + HERE),
    (outside, Plan(), "outside of the model uses weights"),
    (does(sparse, torch.ones(3, 8).to_sparse()), Plan(), "it has a sparse tensor"),
    (lambda: (Rows(50, 8, sparse=True), WORDS[0]), Plan(), "it has a sparse tensor.*try sparse=False"),
    (in_a_dict, Plan(), "outside of the model uses weights" + HERE),
    (two, Plan(), "outside of the model uses weights"),
    (lambda: (STUDENT, step_of_globals), Plan(), "let step.. close over the model and the optimizer"),
    (does(lambda self, x: self.body(x)), Plan(), r"returned a tensor of shape \(3, 8\), which has no loss"),
    (lambda: nn.Linear(1, 1), Plan(), MAKE),
    (lambda: (nn.Linear(1, 1),), Plan(), MAKE),
    (lambda: ("model", torch.ones(1)), Plan(), "must be a torch.nn.Module"),
    (lambda: (nn.Linear(1, 1).to("xpu:7"), ()), Plan(), rf"make\(\) failed: {HERE}: it runs on the CPU"),
    (CAPPED, Plan(recompute=True), "no repeated blocks"),
    (CAPPED, Plan(flash=True), "its attention stores no scores, or it has none"),
    (CAPPED, Plan(chunked_loss=True), "no linear layer leads straight to a cross-entropy"),
    (CAPPED, Plan(four_bit=True), "it trains all its matrices"),
    (CAPPED, Plan(micro_batches=2), "2 micro-batches do not divide a batch of 3"),
    (does(summed, *WORDS, words=50), Plan(chunked_loss=True), r"its logits go through logsumexp\(\) before the loss"),
    (does(smoothed, *WORDS, words=50), Plan(chunked_loss=True), "its cross-entropy has label_smoothing"),
    (does(graph, torch.ones(20, 8), torch.zeros(2, 60).long()), Plan(micro_batches=2), r"\(2, 60\) does not count 20"),
    (lambda: (TimeFirst(), (tokens(), tokens())), Plan(micro_batches=2), "LSTM has time first"),
]


@pytest.mark.parametrize("make, plan, words", REFUSED)
def test_what_cannot_be_run_is_refused_in_words_and_pytorch_prints_nothing(make, plan, words):
    records, log = [], logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    try:
        if plan == Plan():
            with pytest.raises(ValueError, match=words):
                case_of(make).run(plan)
        else:
            row = outcome(case_of(make), plan)
            assert row.result is None and re.search(words, row.remark)
    finally:
        log.removeHandler(handler)
    assert records == [] and not log.disabled
