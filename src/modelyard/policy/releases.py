"""Shares of traffic between the releases of an endpoint: however they change, weights sum to 100.

A release either answers its share (``weight``), or gets copies that nobody
waits for (``shadow``), or answers what the others have no room for
(``fallback``): one of the three.
"""

from collections.abc import Mapping, Sequence

import msgspec

from modelyard.domain.endpoints import Endpoint, Release
from modelyard.policy.scaling import divide

WHOLE = 100
RELEASES_MAX = 16
"""Releases of one endpoint; each has replicas of its own."""


class SharesError(ValueError):
    """Why shares cannot be so, in words for whoever asked; ``param`` is ``weight``, ``shadow`` or ``fallback``."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(reason)
        self.param = param


def main_release(endpoint: Endpoint) -> Release:
    """Return the release with the most traffic, the first of several; an endpoint has at least one."""
    return max(endpoint.releases, key=lambda release: release.weight)


def serving_release(endpoint: Endpoint) -> Release | None:
    """Return the first release with traffic: the one before a canary, until that has all.

    What is only kept to go back to serves nobody.
    """
    return next((release for release in endpoint.releases if release.weight), None)


def with_release(releases: Sequence[Release], new: Release) -> tuple[Release, ...]:
    """Return ``releases`` and ``new``; the others share what it leaves, in the proportions that they had.

    Raises:
        SharesError: they cannot.
    """
    check_shares(new)
    if len(releases) >= RELEASES_MAX:
        raise SharesError("weight", f"the endpoint has {RELEASES_MAX} releases, the most; delete one first")
    return (*_rest(releases, WHOLE - new.weight), new)


def without_release(releases: Sequence[Release], version_id: str) -> tuple[Release, ...]:
    """Return ``releases`` without one; the others take over its share, in the proportions that they had.

    Raises:
        SharesError: no other has traffic.
    """
    left = [release for release in releases if release.version_id != version_id]
    if not any(release.weight for release in left):
        raise SharesError("weight", "no other release has traffic; give another one a weight first")
    return _rest(left, WHOLE)


def with_shares(releases: Sequence[Release], wanted: Mapping[str, Release]) -> tuple[Release, ...]:
    """Return ``releases`` with those in ``wanted`` (by version id) as they are there; the others share the rest.

    Raises:
        SharesError: the weights do not sum to 100, and cannot be made to.
    """
    for release in wanted.values():
        check_shares(release)
    asked = sum(release.weight for release in wanted.values())
    if asked > WHOLE:
        raise SharesError("weight", f"the weights sum to {asked}; the whole is {WHOLE}")
    others = _rest([release for release in releases if release.version_id not in wanted], WHOLE - asked)
    new = {**wanted, **{release.version_id: release for release in others}}
    return tuple(new[release.version_id] for release in releases)


def check_shares(release: Release) -> None:
    """Refuse what one release alone cannot have.

    Raises:
        SharesError: out of range, or both shares at once.
    """
    for param, share in (("weight", release.weight), ("shadow", release.shadow)):
        if not 0 <= share <= WHOLE:
            raise SharesError(param, f"must be 0 to {WHOLE}")
    if release.weight and release.shadow:
        raise SharesError("shadow", "a release that answers requests gets no copies; one of 'weight' and 'shadow' is 0")
    if not 0 <= release.fallback <= RELEASES_MAX:
        raise SharesError("fallback", f"must be 0 (none), or its turn from 1 to {RELEASES_MAX}")
    if release.fallback and (release.weight or release.shadow):
        raise SharesError("fallback", "a fallback has no share of its own; 'weight' and 'shadow' are 0 beside it")


def _rest(releases: Sequence[Release], whole: int) -> tuple[Release, ...]:
    """Scale the weights of ``releases`` so that they sum to ``whole``; none that has traffic loses all of it."""
    weights = {release.version_id: release.weight for release in releases}
    weighted = sum(weight > 0 for weight in weights.values())
    if whole == sum(weights.values()):
        return tuple(releases)
    if weighted == 0:
        raise SharesError(
            "weight", f"{whole} of {WHOLE} are left, and no other release has a weight to scale; name one"
        )
    if 0 < whole < weighted:
        raise SharesError(
            "weight", f"leave at least 1 to each of the {weighted} other releases with traffic, or nothing to all"
        )
    shares = divide(whole, weights)
    return tuple(msgspec.structs.replace(release, weight=shares[release.version_id]) for release in releases)
