"""Lists: one shape and one way to turn the page, for every noun."""

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

import msgspec

from modelyard.errors import invalid_value

T = TypeVar("T")

LIMIT_DEFAULT = 20
LIMIT_MAX = 100

Limit = Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="Most objects to return.")]
After = Annotated[str, msgspec.Meta(description="Return what comes after the object with this id.")]


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A part of a list; ``has_more`` says that more follows after the last id."""

    data: list[T]
    has_more: bool = False
    object: str = "list"


class Paging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query parameters of a plain list."""

    limit: Limit = LIMIT_DEFAULT
    after: After = ""


def page_of(rows: Sequence[T], *, limit: int, after: str, id_of: Callable[[T], str]) -> tuple[Sequence[T], bool]:
    """Return the rows of one page and whether more follow.

    Raises:
        ApiError: 400, no row has the id ``after``.
    """
    start = 0
    if after:
        start = next((place for place, row in enumerate(rows, 1) if id_of(row) == after), 0)
        if start == 0:
            raise invalid_value("after", "no object of this list has this id")
    return rows[start : start + limit], len(rows) > start + limit
