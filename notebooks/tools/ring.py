"""What notebook 07d measures and draws: the memory of a rank, and who computes which scores."""

import torch

from flash import flash_attention
from minizero import World, all_gather
from minizero.memory import Ledger
from minizero.pictures import FONT, MIB
from minizero.pictures.style import box, draw_lines, label_axes, sheet
from minizero.ring_attention import ring_attention

RANKS = {"#A6D8F5": "black", "#E69F00": "black", "#CC79A7": "black", "#5E2750": "white"}  # from light to dark; its ink
LOOKS = ({"color": "#CC79A7", "marker": "s", "linestyle": "dashed"}, {"color": "#5E2750", "marker": "o"})


def by_gathering(q, k, v, comm):
    """Attention to all keys, which every rank gathers first."""
    k, v = (all_gather(x.movedim(-2, 0), comm).movedim(0, -2) for x in (k, v))  # n first: one buffer is filled
    return flash_attention(q, k, v)


def most_held(comm, attention, tokens):
    """Bytes that this rank holds at most in forward, with so many tokens of its own: 4 heads of 64, FP32."""
    with Ledger() as ledger:
        attention(*torch.randn(3, 1, 4, tokens, 64).unbind(), comm)
    return ledger.peak["total"]


def keys_held(comm, attention):
    """Bytes that this rank holds at most if it has one query, in units of its own keys and values."""
    with Ledger() as ledger:
        k, v = torch.randn(2, 1, 2, 4096, 16).unbind()
        attention(k[:, :, :1], k, v, comm)
    return ledger.peak["total"] / (2 * k.nbytes)


def constant_lse(*tensors, **options):
    """FlashAttention, broken: autograd takes the logsumexp for a constant."""
    out, lse = flash_attention(*tensors, **options)
    return out, lse.detach() + 0 * lse


def memory(sizes, tokens):
    """`most_held` for so many ranks, whose text grows with them, by way: {name: [bytes]}."""
    ways = {"gather all keys and values": by_gathering, "ring attention": ring_attention}
    return {name: [max(World(size, "cpu").run(most_held, way, tokens)) for size in sizes] for name, way in ways.items()}


def draw_memory(sizes, tokens, curves):
    axes = sheet(12, 4.6)
    draw_lines(axes, sizes, curves, LOOKS, MIB)
    at = {size: f"{size}\n{size * tokens:,}" for size in sizes}
    label_axes(axes, "ranks, and tokens of the whole text", "MiB that a rank holds", at=at, legend="upper left", ylim=0)
    return axes.figure


def who_computes(comm, zigzag):
    """{(row, column): hop} of this rank's tiles of the causal scores; the text is cut into 2N pieces."""
    last = 2 * comm.size - 1
    pieces = [[r, last - r] if zigzag else [2 * r, 2 * r + 1] for r in range(comm.size)]
    found = {}
    for hop in range(comm.size):
        owner = (comm.rank - hop) % comm.size
        found |= {(row, column): hop for row in pieces[comm.rank] for column in pieces[owner] if column <= row}
    return found


def seconds(tiles):
    """Of each hop the slowest rank's tiles; one on the diagonal is half hidden. tiles: of each rank."""
    work = [[sum(1 - (row == column) / 2 for (row, column), at in of.items() if at == hop) for of in tiles]
            for hop in range(len(tiles))]  # fmt: skip
    return [max(each) for each in work]


def draw_tiles(ways):
    """The causal scores, a rank's rows in its colour, in each tile its hop. ways: {title: tiles of each rank}."""
    panels = sheet(14, 6.4, 1, len(ways))
    for axes, (title, tiles) in zip(panels, ways.items()):
        rows = {}
        for rank, (mine, (color, ink)) in enumerate(zip(tiles, RANKS.items())):
            for (row, column), hop in mine.items():
                box(axes, column, -row - 1, 1, 1, color, str(hop), size=FONT - 1, ink=ink)
                rows[row] = rank
        axes.tick_params(length=0)
        limits = {"xlim": (0, 8.1), "ylim": (-8.1, 0.1), "yticks": [-row - 0.5 for row in rows]}
        limits |= {"xticks": [row + 0.5 for row in rows], "xticklabels": rows.values(), "yticklabels": rows.values()}
        label_axes(axes, "keys of rank; in a tile: its hop", "queries of rank", aspect="equal", title=title, **limits)
        axes.spines[:].set_visible(False)
    return panels[0].figure
