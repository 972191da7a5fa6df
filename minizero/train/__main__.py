"""python -m minizero.train: the main job."""

import os
import sys

from minizero.train.command import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if status:
        os._exit(status)  # ranks that are threads may still compute: they would hold up an orderly exit
