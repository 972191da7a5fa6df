"""`python -m minizero.mixed_precision`: the paper's Table 1, with small networks."""

import sys

from minizero.mixed_precision.table1 import main

if __name__ == "__main__":
    sys.exit(main())
