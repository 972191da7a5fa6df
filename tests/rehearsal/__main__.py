"""python -m tests.rehearsal [part …]: rehearse these parts, by default all."""

import os
import sys
import time
import traceback

os.environ["TRITON_INTERPRET"] = "1"
os.environ["MPLBACKEND"] = "agg"

import flash  # noqa: F401  before there is a GPU, so that Triton interprets
from tests.rehearsal.device import pretend
from tests.rehearsal.programs import PARTS, cause_of


def main():
    pretend()
    failed = 0
    for name in sys.argv[1:] or PARTS:
        start = time.monotonic()
        try:
            PARTS[name]()
        except Exception as error:
            failed += 1
            traceback.print_exc()
            cause = cause_of(error)
            print(f"{name}: {type(cause).__name__}: {cause}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
