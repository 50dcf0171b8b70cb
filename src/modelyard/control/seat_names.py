"""What engines call guests: names that tell who sits there, and so are for the platform alone."""

import hashlib
import re

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.endpoints import Endpoint

NAME_MAX = 100
SEAT_NAME = re.compile(r"[^\s'\"]+@[0-9a-f]{12}")


def seat_name(endpoint: Endpoint, version: ModelVersion) -> str:
    """Return what an engine calls a guest: a name for this content of this endpoint and for nothing else, ever.

    No endpoint can be called so, for the sign in it: callers cannot ask for it.
    """
    content = f"{endpoint.id}:{version.id}:{version.artifact.digest or version.artifact.uri}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return f"{endpoint.name.replace('/', '.')[:NAME_MAX]}@{digest}"


def without_others(text: str, name: str) -> str:
    """Return what an engine said for the owner of the guest ``name``: who else sits there is not for them to know."""
    return SEAT_NAME.sub(lambda found: found[0] if found[0] == name else "another guest", text)
