"""A unit (say, a transformer block) has many parameters, but one flat buffer, so that one message moves them all. The
parameters are views into it, each in its own shape: writing to the buffer is writing to them.

    flat      | 0 1 2 3 4 5 | 6 7 | 8 9 10 11 | pad |    self.numel = 12, without the padding
    offsets     0             6     8
    shapes      (2, 3)        (2,)  (2, 2)

`self` is the unit's layout: self.shapes and self.offsets, one of each for each parameter. A shape's .numel() is its
elements.
"""

import torch

from minizero import Zero1
from minizero.engines.layout import Layout
from tests.exercises.kit import fail, ranks, recognise, wrong
from tests.exercises.training import check_training, train

PLAN = [
    "Cut `flat`, without its padding, into one piece for each parameter, as many elements as its shape has.",
    "Each piece as a view in its shape. No copies. Return the list.",
]
HINTS = [
    "flat[a:b] is a view; so are the pieces of .split(sizes); so is .view(shape).",
    "The sizes that .split takes must add up to the whole: leave the padding out first.",
    "zip(pieces, self.shapes, strict=True) gives both together.",
]
CUT = "flat[: self.numel].split([s.numel() for s in self.shapes])"
VIEW = "piece.view(s)"
WRONG = [
    wrong("copies", (VIEW, "piece.view(s).clone()")),
    wrong("ignores-the-offset", (CUT, "[flat[: s.numel()] for s in self.shapes]")),
    wrong("loses-the-shape", (VIEW, "piece")),
    wrong("one-too-far", (CUT, CUT.replace("[: self.numel]", "[1 : self.numel + 1]"))),
    wrong("transposes", (VIEW, "piece.view(*reversed(s)).permute(*reversed(range(len(s))))")),
    wrong("with-the-padding", (CUT, CUT.replace("[: self.numel]", "")), says="RuntimeError"),
    wrong("to-the-end", (CUT, "[flat[o:] for o in self.offsets]"), says="RuntimeError"),
    wrong(
        "knows-matrices-only",
        (VIEW, "piece.view(*((s[0], -1) if len(s) > 1 else (-1,)))"),
        says="loses-the-shape",
    ),
    wrong("in-fp32", (CUT, CUT.replace("flat", "flat.float()")), says="copies"),
]


def check() -> None:
    layout = Layout(["a", "b", "c"], [torch.Size((2, 3)), torch.Size((2,)), torch.Size((2, 2))], ranks=8)
    flat = torch.arange(16.0)
    got = layout.views(flat)
    if not isinstance(got, list) or len(got) != 3:
        fail("not-a-list", "Expected a list of three views, one for each parameter.")
    for view, shape, offset in zip(got, layout.shapes, layout.offsets):
        n = shape.numel()
        want = flat[offset : offset + n].view(shape)
        if view.shape != shape:
            fail("loses-the-shape", f"A parameter of shape {tuple(shape)} came out as {tuple(view.shape)}: view it so.")
        mistakes = {
            "ignores-the-offset": (flat[:n].view(shape), f"The parameter at offset {offset} was taken from the start."),
            "one-too-far": (
                flat[offset + 1 : offset + 1 + n].view(shape),
                f"The parameter at offset {offset} begins one element too late.",
            ),
            "transposes": (
                want.reshape(-1).view(*reversed(shape)).permute(*reversed(range(len(shape)))),
                "A matrix came out with rows and columns exchanged.",
            ),
        }
        recognise(view, want, mistakes, f"The parameter of shape {tuple(shape)}")
        if view.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            fail(
                "copies", "A parameter is a copy: what the optimizer writes to the buffer would never reach the model."
            )
    # A tensor of three dimensions, and a single number.
    other = Layout(["d", "e"], [torch.Size((2, 1, 3)), torch.Size(())], ranks=8)
    half = torch.arange(8, dtype=torch.float16)
    for view, shape in zip(other.views(half), other.shapes, strict=True):
        if view.shape != shape:
            fail("loses-the-shape", f"A parameter of shape {tuple(shape)} came out as {tuple(view.shape)}: view it so.")
        if view.untyped_storage().data_ptr() != half.untyped_storage().data_ptr():
            fail("copies", "Of a float16 buffer the parameters are copies: what is written to it never reaches them.")
    check_training(ranks(2, train, Zero1, 2), "ZeRO-1")
