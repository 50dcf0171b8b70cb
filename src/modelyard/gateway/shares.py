"""What this gateway worker may apply of each limit: all of it, or its share where several workers divide it.

With one worker a limit is applied as it stands. With several, the controller's
desk leases shares by demand (``policy/leases.py``); an allowance then follows
its share, also when a lease ends while nothing is heard.
"""

from collections.abc import Sequence

from modelyard.domain.leases import LeaseReport, Leases, Share, Wish
from modelyard.domain.tenants import Rates
from modelyard.policy.job import NEVER_S
from modelyard.policy.leases import LeaseHolder, kinds
from modelyard.policy.limits import KINDS, Allowance, Refusal


class Shares:
    """The shares of worker number ``worker`` of ``workers``. ``due_s`` is when ``recheck`` has to be called next."""

    def __init__(self, worker: int, workers: int) -> None:
        self._worker = worker
        self._workers = workers
        self._holder: LeaseHolder | None = None
        self._limited: dict[str, tuple[Allowance, Rates]] = {}
        self._waiting: set[str] = set()
        """Accounts that had no share yet, since this worker has just begun; their first one is a full one."""
        self._refused: dict[str, list[int]] = {}
        self.due_s = NEVER_S

    def is_settled(self, now_s: float) -> bool:
        """Say whether this worker applies its part of limits; for a moment after its start it has none."""
        return self._holder is None or now_s >= self._holder.started_s

    def begin(self, now_s: float) -> None:
        """Begin to take new records: ``allowance`` is called for each of them next."""
        self._limited = {}
        if self._workers > 1 and self._holder is None:
            self._holder = LeaseHolder(self._worker, self._workers, began_s=now_s)
            self.due_s = self._holder.next_change_s(now_s)

    def allowance(self, account: str, limits: Rates, known: Allowance | None, *, now_s: float) -> Allowance:
        """Return the allowance of an account: ``known`` with these limits, or a new one."""
        whole = share = kinds(limits)
        if self._holder is not None and share != (None, None, None):
            share = self._holder.share(account, limits, now_s=now_s)
        if known is None:
            known = Allowance.full(Rates(*share), now_s=now_s)
            if self._holder is not None and now_s < self._holder.started_s:
                self._waiting.add(account)
        elif self._holder is None or known.whole != whole:
            _change(known, share, now_s)
        if self._holder is not None:
            known.account = account if share != (None, None, None) else ""
            known.whole = whole
            if known.account:
                self._limited[account] = (known, limits)
        return known

    def take(self, leases: Leases, *, now_s: float) -> None:
        """Apply what the desk gave."""
        if self._holder is not None:
            self._holder.take(leases)
            self.recheck(now_s)

    def recheck(self, now_s: float) -> None:
        """Let allowances follow their shares, which may have changed with time."""
        holder = self._holder
        if holder is None:
            return
        # Accounts without a lease change once: when this worker has been up for a while.
        accounts = holder.leased() if now_s < self.due_s else list(self._limited)
        for account in accounts:
            if (found := self._limited.get(account)) is not None:
                allowance, limits = found
                share = holder.share(account, limits, now_s=now_s)
                if share == _applied(allowance):
                    continue
                if account in self._waiting:
                    self._waiting.discard(account)
                    _change(allowance, share, now_s)
                else:
                    allowance.resize(Rates(*share), now_s=now_s)
        if now_s >= holder.started_s:
            self._waiting.clear()
        holder.forget(now_s)
        self.due_s = holder.next_change_s(now_s)

    def refused(self, allowances: Sequence[Allowance], refusal: Refusal, tokens: int) -> None:
        """Remember what did not fit, to ask the desk for it."""
        if self._holder is None:
            return
        place = KINDS.index(refusal.kind)
        for allowance in allowances:
            if allowance.account:
                wanted = self._refused.setdefault(allowance.account, [0, 0, 0])
                wanted[place] += tokens if place == 1 else 1

    def report(self, now_s: float) -> LeaseReport | None:
        """Return what the desk should know, None with one worker."""
        if self._holder is None:
            return None
        refused, self._refused = self._refused, {}
        wishes: dict[str, Wish] = {}
        for account, (allowance, _) in self._limited.items():
            allowance.refill(now_s)
            more = refused.get(account, (0, 0, 0))
            running = allowance.running
            wish = (
                _used(allowance.requests_limit, allowance.requests_left) + more[0],
                _used(allowance.tokens_limit, allowance.tokens_left) + more[1],
                running + more[2],
                running,
            )
            if any(wish):
                wishes[account] = wish
        return LeaseReport(self._worker, self._holder.epoch, wishes)


def _used(limit: int | None, left: float) -> int:
    return max(0, int(limit - left + 0.999)) if limit is not None else 0


def _applied(allowance: Allowance) -> Share:
    return allowance.requests_limit, allowance.tokens_limit, allowance.concurrency_limit


def _change(allowance: Allowance, share: Share, now_s: float) -> None:
    if share != _applied(allowance):
        allowance.change(Rates(*share), now_s=now_s)
