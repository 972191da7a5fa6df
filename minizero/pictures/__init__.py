"""Pictures, drawn from plain data: nothing here knows where the data come from.

style.py      colours, size of letters, units
memory.py     what a step holds, by category and by rank
parts.py      what is held at one moment, as bars that add up
timeline.py   what each rank does when
schedule.py   which inputs a schedule keeps, and when
"""

from minizero.pictures.memory import draw_boxes, draw_curves, draw_losses, plot_curve
from minizero.pictures.parts import draw_parts, draw_steps
from minizero.pictures.schedule import plot_schedule
from minizero.pictures.style import COLORS, FONT, MIB, OTHER, PREDICTED
from minizero.pictures.timeline import Event, plot_timeline, save_chrome_trace

__all__ = [
    "COLORS",
    "FONT",
    "MIB",
    "OTHER",
    "PREDICTED",
    "Event",
    "draw_boxes",
    "draw_curves",
    "draw_losses",
    "draw_parts",
    "draw_steps",
    "plot_curve",
    "plot_schedule",
    "plot_timeline",
    "save_chrome_trace",
]
