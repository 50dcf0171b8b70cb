"""When a replica gets no requests because it failed.

The first connection-level failure ejects: with least-requests routing a
replica that fails fast has the shortest queue and would draw *more* traffic
(measured: 1 % of requests lost at one bad replica in four). The pause doubles
with each failure in a row and ends early when the replica answers again.
Answers below 500 never count: a client's bad request is not the replica's fault.
"""

EJECTION_S = 1.0
EJECTION_S_MAX = 30.0


def ejection_s(failures: int) -> float:
    """Return how long a replica pauses after ``failures`` failures in a row (1 or more)."""
    assert failures >= 1, "a replica without failures is not ejected"
    return float(min(EJECTION_S * 2 ** min(failures - 1, 10), EJECTION_S_MAX))
