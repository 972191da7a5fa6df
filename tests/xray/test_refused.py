"""What cannot be run is refused in words, with the user's line; in a table it is a row with the reason."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minizero.xray.case import case_of
from minizero.xray.plan import Plan
from minizero.xray.report import Report
from tests.support.xray_cases import Does, lstm, tokens


def does(function, *inputs, body=None):
    """A make() of a layer, a head, and what is done with them."""
    return lambda: (Does(function, body=body or nn.Linear(8, 8), head=nn.Linear(8, 50)), inputs or (torch.ones(3, 8),))


def lbfgs():
    model, (x,) = does(lambda self, x: self.body(x).mean())()
    optimizer = torch.optim.LBFGS(model.parameters())
    return model, lambda: optimizer.step(lambda: model(x))


STUDENT = nn.Linear(8, 8)
ADAM = torch.optim.Adam(STUDENT.parameters())


class Trainer:
    """Its methods use globals, and a class is not copied."""

    def backward(self):
        STUDENT(torch.ones(3, 8)).sum().backward()

    def optimizer_step(self):
        ADAM.step()


def loop_of(function):
    """A loop on the card, whose step does something to a layer's exponentials."""
    layer = nn.Linear(8, 8)
    return lambda: (layer.to("cuda"), lambda: function(layer(torch.ones(3, 8, device="cuda")).exp()))


def loss_of(function):
    """A model of words, and what leads from its logits to a loss."""
    words = torch.arange(9)
    return does(lambda self, x, y: function(self.head(self.body(x)), y), words, words, body=nn.Embedding(50, 8))


VALUE, HERE, MAKE = "it looks at a tensor's value", r".*\(test_refused\.py:\d+\)", "must return a model and its inputs"
MIXED = "one tensor lies on the host"
OUTSIDE = "a method uses a model or an optimizer that is a global.* or give it to the method's object"
SPARSE = does(lambda self, x: torch.sparse.mm(x, self.body.weight).mean(), torch.ones(3, 8).to_sparse())
SPARSE_ROWS = does(lambda self, x: self.body(x).mean(), torch.arange(9), body=nn.Embedding(50, 8, sparse=True))
GRAPH = does(lambda self, x, edges: self.body(x)[edges[1]].mean(), torch.ones(20, 8), torch.zeros(2, 60).long())
CAPPED = loss_of(lambda logits, y: F.cross_entropy(logits.tanh(), y))
SUMMED = loss_of(lambda logits, y: F.cross_entropy(logits, y) + logits.logsumexp(-1).mean())
SMOOTHED = loss_of(lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1))
REFUSED = [
    (does(lambda self, x: self.body(x * x.sum().item()).mean()), Plan(), VALUE + HERE),
    (does(lambda self, x: self.body(x if x.sum() > 0 else -x).mean()), Plan(), VALUE + HERE),
    (does(lambda self, x: self.body(x[x.sum(1) > 0]).mean()), Plan(), "a shape depends on a tensor's values" + HERE),
    (lbfgs, Plan(), VALUE + HERE),
    (does(lambda self, x: torch.cat([self.body(x), self.head(x)])), Plan(), "must match except in dimension" + HERE),
    (SPARSE, Plan(), "it has a sparse tensor"),
    (SPARSE_ROWS, Plan(), "it has a sparse tensor.*try sparse=False"),
    (lambda: (STUDENT, lambda: Trainer().backward()), Plan(), OUTSIDE + HERE),
    (lambda: (STUDENT, lambda: Trainer().optimizer_step()), Plan(), OUTSIDE + HERE),
    (loop_of(lambda y: y.detach().mean().backward()), Plan(), "no gradient goes from its loss to a parameter" + HERE),
    (loop_of(lambda y: y.backward()), Plan(), "take the mean" + HERE),
    (loop_of(lambda y: y.add_(1).mean().backward()), Plan(), "is changed in place" + HERE),
    (loop_of(lambda y: [loss.backward() for loss in 2 * [y.mean()]]), Plan(), "that an earlier one has freed" + HERE),
    (loop_of(lambda y: y.mean().backward()), Plan(stage=3, ranks=4), "it changes the loop"),
    (loop_of(lambda y: y.to("cuda:1")), Plan(), "it uses a second card" + HERE),
    (loop_of(lambda y: y + torch.ones(8)), Plan(), MIXED + HERE),
    (loop_of(lambda y: torch.ones(3, 8)[torch.arange(3, device="cuda")]), Plan(), MIXED + HERE),
    (loop_of(lambda y: torch.cuda.CUDAGraph()), Plan(), "a part of torch.cuda that is not answered here" + HERE),
    (loop_of(lambda y: sys.exit(1)), Plan(), "it ends the program" + HERE),
    (loop_of(lambda y: torch.optim.SGD([])), Plan(), "has no parameter to train" + HERE),
    (does(lambda self, x: self.body(x)), Plan(), r"returned a tensor of shape \(3, 8\), which has no loss"),
    (does(lambda self, x: self.body(x).mean() * (1 // (not self.training))), Plan(), "by zero" + HERE),  # ours trains
    (lambda: nn.Linear(1, 1), Plan(), MAKE),
    (lambda: (nn.Linear(1, 1),), Plan(), MAKE),
    (lambda: ("model", torch.ones(1)), Plan(), "must be a torch.nn.Module"),
    (lambda: (nn.Linear(1, 1).to("xpu:7"), ()), Plan(), rf"make\(\) failed: {HERE}: it runs on the CPU"),
    (CAPPED, Plan(recompute=True), "no repeated blocks"),
    (CAPPED, Plan(flash=True), "its attention stores no scores, or it has none"),
    (CAPPED, Plan(chunked_loss=True), "no linear layer leads straight to a cross-entropy"),
    (CAPPED, Plan(four_bit=True), "it trains all its matrices"),
    (CAPPED, Plan(micro_batches=2), "2 micro-batches do not divide a batch of 9"),
    (SUMMED, Plan(chunked_loss=True), r"its logits go through logsumexp\(\) before the loss"),
    (SMOOTHED, Plan(chunked_loss=True), "its cross-entropy has label_smoothing"),
    (GRAPH, Plan(micro_batches=2), r"\(2, 60\) does not count 20"),
    (lambda: (lstm(batch_first=False), (tokens(), tokens())), Plan(micro_batches=2), "LSTM has time first"),
]


@pytest.mark.parametrize("make, plan, words", REFUSED)
def test_what_cannot_be_run_is_refused_in_words_and_pytorch_prints_nothing(make, plan, words, caplog, monkeypatch):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(ValueError, match=words):
        case_of(make, card="h100").run(plan)
    assert caplog.records == [] and not log.disabled


def test_a_batch_that_may_count_time_first_is_called_by_its_shape():
    report = Report(case_of(lambda: (lstm(batch_first=False), (tokens(), tokens()))))
    assert "inputs of (4, 32), AdamW" in report.title
    with pytest.raises(ValueError, match="LSTM has time first"):
        report.largest(2**30)
