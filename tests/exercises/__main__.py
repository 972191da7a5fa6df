"""`python -m tests.exercises list|check|hint|watch|solution|questions|reset|gradebook|autograder`."""

import sys

from tests.exercises.commands import main

sys.exit(main())
