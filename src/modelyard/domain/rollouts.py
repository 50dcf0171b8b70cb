"""How an endpoint gets from one version to the next: a rollout, and what it can go back to."""

import msgspec


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of an endpoint's releases under way. Times are unix seconds."""

    stable_id: str
    """The version that served before."""
    candidate_id: str
    """The version that is to serve."""
    began_at: float
