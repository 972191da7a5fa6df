"""python -m minizero.memory: one training step of the demo model, its memory measured."""

import sys

from minizero.one_step import main

if __name__ == "__main__":
    sys.exit(main())
