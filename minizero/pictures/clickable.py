"""Bits that can be clicked, as plain HTML with its script: no kernel, no library, no network.

The HTML holds a table with one number decoded. The script puts buttons in its place. Where scripts are taken out, as on
GitHub, the table stays.
"""

import html
import json
from collections.abc import Mapping
from pathlib import Path

from minizero.pictures.bits import EXPONENT, MANTISSA, SIGN, fields, power, spell

_SCRIPT = Path(__file__).parents[1] / "data" / "clickable_bits.js"


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
