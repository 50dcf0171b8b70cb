"""Which lines of batches give up their slots when somebody comes who does not wait for hours.

The youngest on a replica goes first, since it loses least, as long as the
one who came still waits. Whoever calls it cuts the line off and lets it stand
in line again, to begin anew.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

CUTS_OF_LINE_MAX = 8
"""Times that one line gives up its slot. Where slots are asked for without a pause, batches have a reserved share of
them, and what is always cut off would only heat the room."""
CUTS_MAX = 8
"""Most lines that are cut off for one request: more memory than theirs would not come free at once anyway."""


class Line(Protocol):
    """A line of a batch that is on a replica."""

    @property
    def gave_way(self) -> int:
        """How often it gave up its slot."""
        ...


L = TypeVar("L", bound=Line)


def make_way(
    youngest_first: Callable[[], Iterable[L]],
    *,
    waits: Callable[[], bool],
    can_stop: Callable[[L], bool],
    cut: Callable[[L], None],
) -> None:
    """``cut`` lines off while somebody ``waits``, until nothing is left to be cut off.

    ``can_stop``: whether an engine can take another instead of a line, and nobody has seen any of its answer.
    """
    for _ in range(CUTS_MAX):
        if not waits():
            return
        victim = next((one for one in youngest_first() if one.gave_way < CUTS_OF_LINE_MAX and can_stop(one)), None)
        if victim is None:
            return
        cut(victim)
