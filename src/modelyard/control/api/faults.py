"""What is wrong with a request, all of it at once: every round trip of somebody who is deploying costs minutes."""

from collections.abc import Sequence
from typing import NamedTuple

from modelyard.errors import ApiError


class Fault(NamedTuple):
    """One thing that is wrong."""

    param: str
    reason: str


def refusal(what: str, faults: Sequence[Fault]) -> ApiError:
    """Return the 400 that lists all ``faults``; ``what`` is a sentence like ``This deployment cannot be made.``"""
    listed = "; ".join(f"{fault.param}: {fault.reason.rstrip('.')}" for fault in faults)
    return ApiError(400, code="invalid_value", message=f"{what} {listed}.", param=faults[0].param)
