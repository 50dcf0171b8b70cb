"""What is wrong with a request, all of it at once: every round trip of somebody who is deploying costs minutes."""

from collections.abc import Sequence
from typing import NamedTuple

from modelyard.errors import ApiError
from modelyard.web.gathering import Flaw


class Fault(NamedTuple):
    """One thing that is wrong."""

    param: str
    reason: str


def refusal(what: str, faults: Sequence[Fault]) -> ApiError:
    """Return the 400 that lists all ``faults``; ``what`` is a sentence like ``This deployment cannot be made.``"""
    listed = "; ".join(f"{fault.param}: {fault.reason.rstrip('.')}" for fault in faults)
    end = "" if listed.endswith("?") else "."
    return ApiError(400, code="invalid_value", message=f"{what} {listed}{end}", param=faults[0].param)


def check_all(what: str, flaws: Sequence[Flaw], faults: Sequence[Fault]) -> None:
    """Refuse a request for the fields that do not fit and for the values that are wrong, together.

    Raises:
        ApiError: there is any. What a default in the place of a bad field gave rise to is not told.
    """
    bad = [flaw.param for flaw in flaws]
    real = [one for one in faults if not any(_is_within(one.param, param) for param in bad)]
    if not flaws:
        if real:
            raise refusal(what, real)
        return
    error = refusal(what, [*(Fault(flaw.param, flaw.reason) for flaw in flaws), *real])
    error.code = flaws[0].code
    raise error


def _is_within(param: str, bad: str) -> bool:
    return param == bad or param.startswith((f"{bad}.", f"{bad}["))
