"""Who may use how much of a limit, when several gateways serve one account.

Each limit is divided among the gateways in whole shares, anew as demand moves.
A share is a lease: it ends at a time that both sides read on one clock (Gray
and Cheriton, "Leases", 1989), so that what was given to one is free for others
at that time, whatever became of him. At every moment the shares that gateways
may be applying sum to no more than the limit:

* a gateway with a lease applies that; when it ends without another one, the
  lesser of it and its equal part; ``TERM_S`` later its equal part;
* the desk counts every lease that has not ended, and sets the equal part aside
  for each worker of which it does not know that it holds a lease now. Other
  leases last no longer than it takes that worker to fall back to that part;
* a gateway that just began applies nothing at first: while it was dead, others
  may have been given its part. A desk that just began gives nothing at first:
  the leases of the one before it have to end.

Pure: time comes in as an argument.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelyard.domain.leases import LeaseReport, Leases, Share, Wish
from modelyard.domain.tenants import Rates

TERM_S = 1.0
"""How long a lease lasts. It takes about so long for a share to move from one gateway to another."""
START_S = 1.25 * TERM_S
"""How long a gateway applies nothing, and a desk gives nothing, after its start."""
_LEAST = ((1, 32), (0, 16), (1, 32))
"""The least share by kind: a number, or one part in so many, whichever is more. A new connection needs something."""


class LeaseHolder:
    """A gateway's end: what it may apply now. ``began_s`` is when its process began."""

    def __init__(self, worker: int, workers: int, *, began_s: float) -> None:
        self._worker = worker
        self._workers = workers
        self.started_s = began_s + START_S
        """From here on this gateway applies its equal part where it has no lease."""
        self._leases: dict[str, tuple[float, Share]] = {}
        self.epoch = 0

    def take(self, leases: Leases) -> None:
        """Apply what the desk gave. An account that it leaves out keeps its lease to its end."""
        self.epoch = leases.epoch
        for account, share in leases.shares.items():
            self._leases[account] = (leases.until_s, share)

    def forget(self, now_s: float) -> None:
        """Drop leases that say nothing any more."""
        for account in [one for one, (until_s, _) in self._leases.items() if now_s >= until_s + TERM_S]:
            del self._leases[account]

    def leased(self) -> list[str]:
        """Return the accounts with a lease that still says something."""
        return list(self._leases)

    def next_change_s(self, now_s: float) -> float:
        """Return when a share will change by itself."""
        times = [self.started_s]
        times += [at for until_s, _ in self._leases.values() for at in (until_s, until_s + TERM_S)]
        return min((at for at in times if at > now_s), default=float("inf"))

    def share(self, account: str, limits: Rates, *, now_s: float) -> Share:
        """Return what of ``limits`` this gateway may apply now."""
        until_s, told = self._leases.get(account, (float("-inf"), (None, None, None)))
        found: list[int | None] = []
        for limit, lease in zip(kinds(limits), told, strict=True):
            if limit is None:
                found.append(None)
                continue
            equal = equal_share(limit, self._worker, self._workers)
            if lease is None or now_s >= until_s + TERM_S:
                amount = equal if now_s >= self.started_s else 0
            elif now_s >= until_s:
                amount = min(lease, equal)
            else:
                amount = lease
            found.append(min(amount, limit))
        return found[0], found[1], found[2]


@dataclass(slots=True)
class _Gateway:
    worker: int
    wishes: Mapping[str, Wish] = field(default_factory=dict)
    frames: deque[Leases] = field(default_factory=deque)
    has: Leases | None = None
    """The newest of the leases that it is known to have."""
    is_gone: bool = False


class LeaseDesk:
    """The desk of one controller life. ``workers`` is into how many equal parts limits fall without a desk."""

    def __init__(self, *, workers: int, began_s: float) -> None:
        self._workers = workers
        self._began_s = began_s
        # Epochs of an earlier desk on this clock are less.
        self._epoch = int(began_s * 1000)
        self._gateways: dict[str, _Gateway] = {}
        self._limits: dict[str, Rates] = {}

    def limit(self, limits: Mapping[str, Rates]) -> None:
        """Take the limits of all accounts that have some."""
        self._limits = dict(limits)

    def hear(self, gateway_id: str, report: LeaseReport) -> None:
        """Take a report of a gateway that is connected."""
        gateway = self._gateways.setdefault(gateway_id, _Gateway(report.worker))
        gateway.worker, gateway.wishes, gateway.is_gone = report.worker, report.wishes, False
        gateway.has = next((frame for frame in gateway.frames if frame.epoch == report.epoch), None)

    def lose(self, gateway_id: str) -> None:
        """Take note that a gateway is not connected any more; its leases last to their end."""
        if (gateway := self._gateways.get(gateway_id)) is not None:
            gateway.is_gone, gateway.has, gateway.wishes = True, None, {}

    def give(self, now_s: float) -> dict[str, Leases]:
        """Divide anew; return the leases to send by gateway."""
        for gateway_id, gateway in list(self._gateways.items()):
            while gateway.frames and gateway.frames[0].until_s <= now_s:
                gateway.frames.popleft()
            if gateway.is_gone and not gateway.frames:
                del self._gateways[gateway_id]
        live = {name: one for name, one in sorted(self._gateways.items()) if not one.is_gone}
        if now_s < self._began_s + START_S or (self._workers == 1 and len(live) < 2):
            return {}
        # An account that is leased stays so until no lease is left: then all have their equal part at one time.
        used = {account for one in live.values() for account, wish in one.wishes.items() if any(wish)}
        shares: dict[str, dict[str, Share]] = {name: {} for name in live}
        for account in sorted(used & self._limits.keys()):
            for name, share in self._divide(account, live, now_s).items():
                shares[name][account] = share
        given: dict[str, Leases] = {}
        for name, gateway in live.items():
            if shares[name]:
                self._epoch += 1
                given[name] = Leases(self._epoch, now_s + TERM_S, shares[name])
                gateway.frames.append(given[name])
        return given

    def _divide(self, account: str, live: Mapping[str, _Gateway], now_s: float) -> dict[str, Share]:
        """Return the lease of each live gateway: what it should have, as far as nobody else may be applying it."""
        told: list[list[int | None]] = [[None, None, None] for _ in live]
        known = {gateway.worker for gateway in self._gateways.values()}
        for kind, limit in enumerate(kinds(self._limits[account])):
            if limit is None:
                continue
            held = [self._held(one, account, kind, limit, now_s) for one in live.values()]
            others = [self._held(one, account, kind, limit, now_s) for one in self._gateways.values() if one.is_gone]
            others += [equal_share(limit, one, self._workers) for one in range(self._workers) if one not in known]
            room = max(0, limit - sum(others))
            ideal = divided(room, [_weight(one.wishes.get(account), kind) for one in live.values()], kind)
            # Everybody's least share is nobody else's at any time; only what is above it moves. So a gateway is never
            # left with nothing while what others were given before has to end.
            least = least_share(room, len(live), kind)
            above = [max(0, one - least) for one in held]
            taken = sum(above)
            for place, wish in enumerate(ideal):
                # Beside what all others may be applying, the old or the new, whichever is more.
                taken -= above[place]
                share = min(wish - least, max(0, room - least * len(live) - taken))
                told[place][kind] = least + share
                taken += max(above[place], share)
        return {name: (share[0], share[1], share[2]) for name, share in zip(live, told, strict=True)}

    def _held(self, gateway: _Gateway, account: str, kind: int, limit: int, now_s: float) -> int:
        """Return the most of a limit that a gateway may be applying, now or before a lease given now ends."""
        leased = [share[kind] or 0 for frame in gateway.frames if (share := frame.shares.get(account)) is not None]
        if kind == 2 and (wish := gateway.wishes.get(account)) is not None:
            # What runs goes on, however small the lease has become.
            leased.append(wish[3])
        has = gateway.has
        if has is None or has.until_s <= now_s or account not in has.shares:
            leased.append(equal_share(limit, gateway.worker, self._workers))
        return max(leased)


def divided(limit: int, weights: Sequence[float], kind: int) -> list[int]:
    """Return whole shares that sum to ``limit``, in proportion to ``weights`` above a least one for each."""
    count = len(weights)
    least = least_share(limit, count, kind)
    rest, total = limit - least * count, sum(weights)
    fair = [rest * (weight / total if total else 1 / count) for weight in weights]
    shares = [int(one) for one in fair]
    # What rounding left goes to the largest fractions, then to the first.
    order = sorted(range(count), key=lambda place: (shares[place] - fair[place], place))
    for place in order[: rest - sum(shares)]:
        shares[place] += 1
    return [least + one for one in shares]


def least_share(limit: int, count: int, kind: int) -> int:
    """Return the least that each of ``count`` gateways gets of a limit, however little it wants."""
    number, part = _LEAST[kind]
    return min(max(number, limit // (part * count)), limit // count)


def equal_share(limit: int, worker: int, workers: int) -> int:
    """Return the part of worker number ``worker`` where nobody divides."""
    return limit // workers + (1 if worker < limit % workers else 0)


def kinds(limits: Rates) -> Share:
    """Return the limits in the order of shares."""
    return limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency


def _weight(wish: Wish | None, kind: int) -> float:
    return float(wish[kind]) if wish is not None else 0.0
