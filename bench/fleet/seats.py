"""Whether guests of a host burden its replicas evenly, which the fleet simulator takes for granted.

``policy/guests.py`` seats the guests of each shared base by their rates of one moment; gateways then send each guest's
requests where least is going on among its seats. What is left over is a replica with more than it can serve.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from modelyard.domain.fleet import GuestSeat, SeatState
from modelyard.policy import guests
from modelyard.policy.guests import Drain, HostSeen, Load, SeatSeen, Unload, Wanted

SEATS = 256
"""Adapters that a replica holds, most of them in its host's memory."""
_ROUNDS = 400
_EVEN = 200


class Burden(msgspec.Struct, frozen=True):
    """``most``: the busiest replica's load over the mean. ``seats``: those that guests have, for each guest."""

    most: float
    seats: float


def seated(rates: Sequence[float], replicas: int) -> dict[str, list[str]]:
    """Return where each guest sits once the policy has nothing more to do."""
    sitting: dict[str, dict[guests.Key, GuestSeat]] = {f"replica-{number:03}": {} for number in range(replicas)}
    now_s = 0.0
    for _ in range(_ROUNDS):
        now_s += 5.0
        hosts = [
            HostSeen(id=id, capacity=SEATS, bases=frozenset({"base"}), seats=[_seen(one) for one in seats.values()])
            for id, seats in sitting.items()
        ]
        wanted = [
            Wanted(key=(f"{number}", "v1"), name=f"{number}", base="base", rate=rate, idle_s=0.0 if rate else 3600.0)
            for number, rate in enumerate(rates)
        ]
        actions = guests.plan(hosts, wanted, now_s).actions
        for action in actions:
            seats = sitting[action.replica_id]
            match action:
                case Load(key=key):
                    seats[key] = GuestSeat(*key, "adapter", SeatState.READY, now_s)
                case Drain(key=key):
                    seats[key] = msgspec.structs.replace(seats[key], state=SeatState.DRAINING, since=now_s)
                case Unload(key=key):
                    del seats[key]
        if not actions:
            break
    found: dict[str, list[str]] = defaultdict(list)
    for id, seats in sitting.items():
        for endpoint_id, _ in seats:
            found[endpoint_id].append(id)
    return found


def _seen(seat: GuestSeat) -> SeatSeen:
    return SeatSeen(seat=seat, in_flight=0 if seat.state is SeatState.DRAINING else 1)


def burden(rates: Sequence[float], replicas: int) -> Burden:
    """Return how uneven the loads of replicas are, each guest's requests being shared out among its seats."""
    where = seated(rates, replicas)
    shares = {guest: dict.fromkeys(ids, 1 / len(ids)) for guest, ids in where.items()}
    loads: dict[str, float] = {}
    for _ in range(_EVEN):  # water finds its level
        loads = defaultdict(float)
        for guest, parts in shares.items():
            for id, part in parts.items():
                loads[id] += rates[int(guest)] * part
        for guest, parts in shares.items():
            weights = {id: part / (loads[id] + 1e-9) ** 0.5 for id, part in parts.items()}
            total = sum(weights.values())
            shares[guest] = {id: weight / total for id, weight in weights.items()}
    mean = sum(rates) / replicas
    return Burden(
        max(loads.values(), default=0.0) / max(mean, 1e-9), sum(map(len, where.values())) / max(len(where), 1)
    )
