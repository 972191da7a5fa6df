"""Pictures that can be clicked, as plain HTML with its script: no kernel, no library, no network.

Bits: the HTML holds a table with one number decoded, and the script puts buttons in its place. A player: the HTML holds
one frame and a sentence, and the script takes the sentence away. Where scripts are taken out, as on GitHub or in a
notebook that is not trusted yet, the table, the frame and the sentence stay.
"""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

from matplotlib.animation import Animation

from minizero.pictures.bits import EXPONENT, MANTISSA, SIGN, fields, power, spell

_SCRIPT = Path(__file__).parents[1] / "data" / "clickable_bits.js"
# matplotlib's buttons fetch their icons from the web. These signs stand in for them: any typeface has them.
SIGNS = {"minus": "−", "fast-backward": "|◀◀", "step-backward": "|◀", "play fa-flip-horizontal": "◀", "pause": "❚❚"}
SIGNS |= {"play": "▶", "step-forward": "▶|", "fast-forward": "▶▶|", "plus": "+"}
ASLEEP = "This player is asleep. Run this notebook, or trust it (in JupyterLab: View, Activate Command Palette, Trust)."


def player(animation: Animation) -> str:
    """HTML with buttons for an animation of matplotlib. Its first frame stands still until it is started."""
    made = plain_signs(animation.to_jshtml(default_mode="once"))
    frames = re.findall(r'frames\[\d+\] = "([^"]*)"', made)
    if not frames:  # none was drawn
        return made
    asleep = f'<p class="asleep">{ASLEEP}</p>'
    wake = 'for (const said of document.querySelectorAll(".asleep")) said.remove();'
    made = made.replace("<img id=", f'<img src="{frames[0]}" id='.replace("\\\n", ""), 1)
    return f"{asleep}{made}<script>{wake}</script>"


def plain_signs(made: str) -> str:
    """A player's HTML without what it would fetch."""
    for icon, sign in SIGNS.items():
        made = made.replace(f'<i class="fa fa-{icon}"></i>', sign)
    return re.sub(r"<link[^>]*font-awesome[^>]*>", "", made)


def clickable_bits(
    bits: int, exponent_bits: int = 5, mantissa_bits: int = 10, presets: Mapping[str, int] | None = None
) -> str:
    """HTML of a pattern with a button for each bit, and what it stands for.

    bits: the pattern at the start, a normal number. presets: patterns that a click sets, by the words on their button.
    """
    sign, field, mantissa = fields(bits, exponent_bits, mantissa_bits)
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    if not 0 < field < 2**exponent_bits - 1:
        raise ValueError(f"the pattern {bits:#x} is no normal number: begin with one, the table explains it")
    significand, exponent = 1 + mantissa / steps, field - bias
    value = (-1) ** sign * significand * 2.0**exponent
    cells = [
        ("sign", "exponent field", "mantissa"),
        tuple(spell(bits, exponent_bits, mantissa_bits).split()),
        (
            "−" if sign else "+",
            f"{field} − {bias} = {exponent}: × {power(exponent)}".replace("= -", "= −"),
            f"1 + {mantissa}/{steps} = {significand}",
        ),
    ]
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    data = {
        "bits": bits,
        "exponent": exponent_bits,
        "mantissa": mantissa_bits,
        "colors": json.dumps([SIGN, EXPONENT, MANTISSA]),
        "presets": json.dumps(list((presets or {}).items()), ensure_ascii=False),
    }
    attributes = " ".join(f'data-{key}="{html.escape(str(entry), quote=True)}"' for key, entry in data.items())
    return (
        f'<div class="clickable-bits" {attributes}><table>{rows}</table><p>Value: {value}. (This page runs no scripts, '
        f"so nothing can be clicked here.)</p></div><script>{_SCRIPT.read_text(encoding='utf-8')}</script>"
    )
