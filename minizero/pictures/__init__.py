"""Pictures, drawn from plain data: nothing here knows where the data come from.

style.py      colours, size of letters, units; what all are made of: panels, lines, boxes, words, labels
memory.py     what a step holds, by category
parts.py      what is held at one moment, as bars that add up
shards.py     who holds which part of it
timeline.py   what each rank does when
schedule.py   which inputs a schedule keeps, and when
ring.py       chunks on their way round a ring
traffic.py    what ranks send, and how long it takes
bits.py       the fields of a number, and of formats
numbers.py    where the numbers of a format lie, and where rounding takes the others
clickable.py  bits that can be clicked, as HTML
mixed.py      what 16 bits break, and what mixed precision holds
"""

from minizero.pictures.memory import draw_curves, draw_losses, mark_place, plot_curve
from minizero.pictures.parts import draw_parts, draw_steps
from minizero.pictures.ring import animate_ring, draw_ring
from minizero.pictures.schedule import plot_schedule
from minizero.pictures.shards import draw_board, draw_boards, draw_boxes, draw_numbers
from minizero.pictures.style import COLORS, FONT, MIB, OTHER, PREDICTED
from minizero.pictures.timeline import Event, chrome_trace, plot_timeline
from minizero.pictures.traffic import draw_bound, draw_busiest, draw_message_times, draw_predicted_times

__all__ = ["COLORS", "FONT", "MIB", "OTHER", "PREDICTED", "Event"]
__all__ += ["draw_curves", "draw_losses", "mark_place", "plot_curve", "draw_parts", "draw_steps"]
__all__ += ["animate_ring", "draw_ring", "draw_board", "draw_boards", "draw_boxes", "draw_numbers"]
__all__ += ["plot_schedule", "plot_timeline", "chrome_trace"]
__all__ += ["draw_bound", "draw_busiest", "draw_message_times", "draw_predicted_times"]
