"""What the client scripts share: their arguments, and a list of checks that a run goes through and tells of.

A script runs in the environment of its client, so this imports nothing but the
standard library. Its arguments are the platform's URL (without ``/v1``), a key
and the name of a model.
"""

import json
import sys
from collections.abc import Callable

URL, KEY, MODEL = sys.argv[1:4]
BASE = f"{URL}/v1"
TEXT = "hello big world"
"""What the echo of the simulated model answers to itself."""
checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function part of the run."""
    checks.append(function)
    return function


def run() -> None:
    """Go through all checks and print their names; the first that fails ends the process."""
    for function in checks:
        function()
    print(json.dumps([function.__name__ for function in checks]))
