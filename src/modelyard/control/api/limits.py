"""Limits as they are asked for; shared by keys and tenants."""

from typing import Annotated

import msgspec

from modelyard.domain.tenants import Limits

_Most = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class LimitsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Upper bounds; what is left out or null is not bounded."""

    requests_per_minute: _Most | None = None
    tokens_per_minute: _Most | None = None
    concurrency: _Most | None = None

    def limits(self) -> Limits:
        """Return the domain's value."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)
