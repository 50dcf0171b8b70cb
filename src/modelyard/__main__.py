"""``python -m modelyard``: the command line, and how ``up`` starts each plane as a process of its own."""

import sys

from modelyard.cli.main import main

sys.exit(main())
