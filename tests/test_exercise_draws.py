"""The drawn cases of the checks, what every case looks at, and how results are compared and named."""

import json

import pytest
import torch

from tests.exercises import kit, rank_kit, stubs
from tests.exercises.course import COURSE, find
from tests.exercises.kit import compare, wrong
from tests.exercises.machine import judge
from tests.exercises.machine.checker import Checker

NAN, INF = float("nan"), float("inf")
# What no lesson looks for, and every case does: of each kind an answer, and what it is told.
KINDS = [
    ("pad", "leaves-a-mode", "missing = -", "torch.use_deterministic_algorithms(True)\n    missing = -"),
    ("pad", "leaves-a-mode", "missing = -", "torch.autograd.set_detect_anomaly(True)\n    missing = -"),
    ("pad", "leaves-a-mode", "missing = -", "import os\n    os.environ['OMP_NUM_THREADS'] = '7'\n    missing = -"),
    ("pad", "leaves-a-mode", "missing = -", "import warnings\n    warnings.simplefilter('ignore')\n    missing = -"),
    ("reduce_scatter", "leaves-a-mode", "    left, right", "    torch.set_flush_denormal(True)\n    left, right"),
    ("pad", "grows", "    return torch.cat", "    KEPT.append([0.5] * 99)\n    return torch.cat"),
    ("pad", "grows", "tensor.new_zeros(missing, *tensor.shape[1:])", "CACHE.setdefault((missing, tensor.shape, "
     "tensor.dtype, tensor.device), tensor.new_zeros(missing, *tensor.shape[1:]))"),
    ("reduce_scatter", "random", "    left, right", "    lists = [c.tolist() for c in chunks]\n    left, right"),
    ("all_reduce", "leaves-out-the-device", "tensor.new_zeros(-(-tensor.numel() // comm.size) * comm.size)",
     "torch.zeros(-(-tensor.numel() // comm.size) * comm.size, dtype=tensor.dtype)"),
    ("online_softmax", "leaves-out-the-device", "torch.zeros_like(values[0])",
     "torch.zeros(values.shape[1], dtype=values.dtype)"),
    ("bug_zero2", "leaves-a-mode", "    hooks = [", "    for p in shards:\n        p.mine = shards[p]\n    hooks = ["),
    ("hybrid", "leaves-a-mode", "    return shard", "    gradient.zero_()\n    return shard"),
]  # fmt: skip


@pytest.fixture(scope="module")
def seed_1():
    """A draw may miss what is wrong in one case of many: always the same."""
    with Checker(seed="1") as checker:
        yield checker


@pytest.fixture
def write(tmp_path):
    def path_of(exercise, answer=None):
        path = tmp_path / exercise.file
        path.write_text(stubs.answer(exercise, answer))
        return path

    return path_of


@pytest.mark.parametrize("exercise", [e for e in COURSE if e.is_possible()], ids=lambda exercise: exercise.id)
def test_each_wrong_answer_is_an_edit_of_the_reference(exercise):
    """The error names the exercise, the answer, and the text that is not there."""
    for answer in exercise.load().WRONG:
        assert stubs.answer(exercise, answer)


def test_an_edit_that_no_longer_applies_is_named():
    with pytest.raises(ValueError, match="exercise 01, wrong answer old: the reference has 0 times, not once:\nlines"):
        stubs.answer(find("pad"), wrong("old", "", ("lines", "")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told", "old", "new"), KINDS)
def test_what_every_case_looks_at_is_seen_without_a_lesson_s_help(name, told, old, new, write, seed_1):
    path = write(find(name), wrong("kind", "", (old, new)))
    path.write_text(f"{path.read_text()}\n\nKEPT, CACHE = [], {{}}\n")
    outcome = seed_1.check(find(name), path)
    assert (outcome.status, outcome.name) == ("failed", told), outcome


@pytest.mark.slow
def test_a_seed_gives_the_same_cases_again(write):
    lesson = find("decode").load()
    path = write(
        find("decode"), wrong("minus zero is zero", "", ("-1.0 if sign else 1.0", "-1.0 if sign and code else 1.0"))
    )
    assert judge.drawn(lesson, "7") == judge.drawn(lesson, "7") != judge.drawn(lesson, "8")
    outcome = judge.examine(find("decode"), path, "7", judge.Judge())
    assert outcome.status == "failed" and "SEED=7" in outcome.words and "-0.0" in outcome.words, outcome


@pytest.mark.slow
def test_two_slips_at_once_are_told_the_likely_one(write):
    """The first case shows one of them only; no known mistake does the same in all cases."""
    exercise = find("pad")
    path = write(exercise, wrong("two", "", ("new_zeros", "new_ones"), (" if missing else tensor", "")))
    text = path.read_text().replace("tensor.new_ones(missing,", "(tensor.new_ones if tensor.dim() > 1 else "
                                    "tensor.new_zeros)(missing,")  # fmt: skip
    path.write_text(text)
    outcome = judge.examine(exercise, path, "7", judge.Judge())
    assert outcome.name == "always-copies" and "return the tensor itself" in outcome.words, outcome


@pytest.mark.slow
def test_what_an_answer_did_comes_as_data(write):
    """Of any dtype, shape and layout. What is no data is no verdict, but an end of its own."""
    numbers = torch.arange(12.0).view(3, 4).T
    values = [numbers.to(dtype) for dtype in (*rank_kit.DTYPES, torch.bool, torch.complex64)] + [
        numbers[:0],
        torch.ones(1, 2)[:, :1],
        torch.ones((), requires_grad=True),
        numbers[1, 1:2],
    ]
    values += [NAN, -0.0, 2**70, True, None, "x", {"a": [1, (2.5, -INF)]}, kit.AtMost(3, 1.5)]
    for value in values:
        assert not compare(judge.unpack(json.loads(json.dumps(judge.pack(value)))), value), value
    for seen in ({}, 7, {"end": None}, {"end": 7}, {"case": {"tensor": ["os.system", [1], "", False]}},
                 {"case": [{}]}, {"end": {"status": "passed", "name": "passed", "words": ""}}):  # fmt: skip
        assert judge.Judge().step(find("pad"), "7", 1, seen)["verdict"]["status"] == "failed", seen


def test_what_differs_is_said():
    tensor = torch.tensor
    for got, want in (
        (tensor([NAN]), tensor([0.0])),
        (tensor([0.0]), tensor([NAN])),
        (tensor([torch.finfo(torch.float32).max]), tensor([INF])),
        (tensor([-0.0]), tensor([0.0])),
        (tensor([1]), tensor([1.0])),
        (tensor([1.0]), tensor([[1.0]])),
        (tensor([1.0]), tensor([1.0], requires_grad=True)),
        (1.0, tensor(1.0)),
        (-0.0, 0.0),
        (True, 1),
        (1.5, 1),
        (NAN, 1.0),
        (None, 1),
        ({"a": 1}, {"a": 2}),
        ({}, {"a": 2}),
        ([1], [1, 2]),
        (1, [1]),
        ("x", {"inexact"}),
    ):
        assert compare(got, want), (got, want)
        assert not compare(want, want) and not compare(got, got)
    assert compare({"rank 1": [1, 2]}, {"rank 1": [1, 3]}) == "The result, rank 1, place 1 is 2, expected 3"
    assert "1 of 2 values are wrong, the first at place 1: 2.0, expected 3.0" in compare(
        tensor([1.0, 2.0]), tensor([1.0, 3.0])
    )
    assert compare("", "unit 0") == "The result is an empty text, expected unit 0"
    near, far, want = tensor([1e-9, 1.0]), tensor([1e-2, 1.0]), tensor([0.0, 1.0])
    assert compare(far, want, 1e-6) and not compare(near, want, 1e-6) and not compare(1 + 1e-9, 1.0, 1e-6)
    assert not compare(tensor([NAN, INF, -0.0]), tensor([NAN, INF, 0.0]), 1e-6)
