"""Ctrl-C while a command of ours imports is one line, as it is later. `minizero` imports this first."""

import sys

# While Python looks for the module of `python -m minizero.train`, it calls the program "-m".
if sys.argv[:1] == ["-m"] and any(word.startswith("minizero.") for word in sys.orig_argv):
    usual = sys.excepthook
    interrupted = lambda *_: print("interrupted", file=sys.stderr)  # noqa: E731
    sys.excepthook = lambda kind, *rest: (interrupted if kind is KeyboardInterrupt else usual)(kind, *rest)
