"""Do the books agree: journals, ledger, engines, Stripe, invoices of providers.

Each file is one comparison and yields one ``Check``. A difference is never
only a number: it says which way it goes, in tokens and in money, and names the
requests behind it. What is allowed to differ, and why, is said with each.
"""

import msgspec

LISTED_MAX = 50
"""Differences of a check that are listed; all are counted."""
NAMED_MAX = 20
"""Requests that are named behind one difference."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two books that do not agree; amounts are the first one less the second."""

    subject: str
    """A request, a replica, an hour, a model."""
    what: str
    tokens: int = 0
    nanousd: int = 0
    request_ids: list[str] = []


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. ``problem``: why it could not be made as a whole; then it proves nothing."""

    name: str
    compared: int
    """How many things were compared."""
    unit: str
    found: int = 0
    """How many differ."""
    tokens: int = 0
    nanousd: int = 0
    differences: list[Difference] = []
    notes: list[str] = []
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it was made, and nothing differs."""
        return not self.found and not self.problem


class Findings:
    """Collects differences: counts all, lists the first."""

    def __init__(self, name: str, unit: str) -> None:
        self._name = name
        self._unit = unit
        self._listed: list[Difference] = []
        self.compared = 0
        self.notes: list[str] = []
        self.problem = ""
        self._found = self._tokens = self._nanousd = 0

    @property
    def found(self) -> int:
        """Return how many differ so far."""
        return self._found

    def add(self, difference: Difference) -> None:
        """Take one in."""
        self._found += 1
        self._tokens += difference.tokens
        self._nanousd += difference.nanousd
        if len(self._listed) < LISTED_MAX:
            self._listed.append(difference)

    def check(self) -> Check:
        """Return what was found."""
        return Check(
            name=self._name,
            compared=self.compared,
            unit=self._unit,
            found=self._found,
            tokens=self._tokens,
            nanousd=self._nanousd,
            differences=self._listed,
            notes=self.notes,
            problem=self.problem,
        )
