"""Which requests take engines down, so that no fleet dies of one of them.

A query of death crashes any engine that gets it (vLLM CVE-2026-44223 and
CVE-2025-48944, say); retried like any other request, it would take down one
replica after the other. A request that was on two engines when they died is
not tried again, and one that is *known* to be the cause is refused for a while.

Blame must be robust, for a replica that dies takes innocent requests along. A
request is condemned after crashes of at least two different replica starts,
when in one of them it was alone, or when it is the only one that was there
each time (three times, if its answer had begun: a long stream that is moved
from one dying replica to the next is more often unlucky than deadly). An
answer proves innocence.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

REFUSED_S = 600.0
"""How long a condemned request is refused, and how long a crash is remembered."""
CRASHES_MIN = 2
"""Engines that a request may take down; with the second it is out."""
CRASHES_BEGUN_MIN = 3
"""Crashes that condemn a request among others when its answer had begun in one of them."""
SUSPECTS_MAX = 1000
CRASHES_MAX = 64
SETTLED_S = 1.0
"""When all requests of a crash have been reported; the connections of a dead process break within milliseconds."""


def fingerprint(body: bytes) -> int:
    """Return 64 bits that tell a request by the body that engines get."""
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big")


@dataclass(slots=True, eq=False)
class _Crash:
    """One death of one replica start: who was there, and how many there must have been."""

    began_s: float
    total: int = 0
    waiting_total: int = 0
    reports: int = 0
    waiting_reports: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    """Those without a token yet, and how often each was there."""
    begun: dict[int, int] = field(default_factory=dict)

    def report(self, print_: int, *, others: int, others_waiting: int, has_begun: bool) -> None:
        # Those who reported before were others too, though they may no longer hold a slot: the most that any saw.
        self.total = max(self.total, others + 1 + self.reports)
        self.waiting_total = max(self.waiting_total, others_waiting + (not has_begun) + self.waiting_reports)
        self.reports += 1
        self.waiting_reports += not has_begun
        there = self.begun if has_begun else self.waiting
        there[print_] = there.get(print_, 0) + 1

    def was_alone(self, print_: int) -> bool:
        """Say whether nobody else can have caused it.

        Who waits for its first token is to blame before those whose answers had begun, as engines die at the start
        of a request.
        """
        if print_ in self.waiting:
            return self.waiting[print_] == self.waiting_total
        return self.begun.get(print_) == self.total

    def is_settled(self, now_s: float) -> bool:
        return self.reports >= self.total or now_s - self.began_s >= SETTLED_S

    def forget(self, print_: int) -> None:
        self.waiting.pop(print_, None)
        self.begun.pop(print_, None)


class Suspects:
    """What one gateway knows of crashes. Fingerprints are ints of 64 bits; seconds are monotonic.

    ``if suspects.has_any`` is all that a hot path pays when there is nothing to know; only then is a fingerprint
    worth its price.
    """

    __slots__ = ("_by_print", "_crashes", "_refused", "has_any")

    def __init__(self) -> None:
        self.has_any = False
        self._crashes: OrderedDict[str, _Crash] = OrderedDict()
        self._by_print: OrderedDict[int, list[_Crash]] = OrderedDict()
        self._refused: OrderedDict[int, float] = OrderedDict()

    def __bool__(self) -> bool:
        return self.has_any

    def __repr__(self) -> str:
        return f"<Suspects: {len(self._by_print)} after {len(self._crashes)} crashes, {len(self._refused)} refused>"

    def lost(
        self, print_: int, start_id: str, *, others: int, others_waiting: int, has_begun: bool, now_s: float
    ) -> bool:
        """Note that a request was on an engine when its connection broke; say whether nothing else was there.

        ``start_id`` names the start of the engine's process: a replica's id, which no other start has. ``others``:
        how many other requests are on it at this moment (not yet reported themselves), ``others_waiting`` of them
        without any token. Only for connections that broke by themselves: no time-outs, no drains, and not when
        nothing was sent yet.
        """
        self.has_any = True
        crash = self._crashes.get(start_id)
        if crash is None:
            crash = self._crashes[start_id] = _Crash(now_s)
            while len(self._crashes) > CRASHES_MAX:
                self._forget(self._crashes.popitem(last=False)[1])
        crash.report(print_, others=others, others_waiting=others_waiting, has_begun=has_begun)
        crashes = self._by_print.setdefault(print_, [])
        if crash not in crashes:
            crashes.append(crash)
        self._by_print.move_to_end(print_)
        while len(self._by_print) > SUSPECTS_MAX:
            self._by_print.popitem(last=False)
        self._judge(print_, now_s)
        return crash.total == 1

    def answered(self, print_: int) -> None:
        """Note that an engine answered the request and lives: it was not the cause."""
        self._refused.pop(print_, None)
        # The crashes stay, for whoever else was there.
        for crash in self._by_print.pop(print_, ()):
            crash.forget(print_)
        self._look()

    def may_retry(self, print_: int) -> bool:
        """Say whether a request whose engine died may be tried on another: once, and never after a second death."""
        return print_ not in self._refused and len(self._by_print.get(print_, ())) < CRASHES_MIN

    def is_refused(self, print_: int, now_s: float) -> bool:
        """Say whether the request is known to take engines down."""
        until_s = self._refused.get(print_)
        if until_s is None:
            return print_ in self._by_print and self._judge(print_, now_s)
        if now_s < until_s:
            return True
        self.answered(print_)
        return False

    def forget_old(self, now_s: float) -> None:
        """Drop what is older than ten minutes; called by the sweep."""
        if not self.has_any:
            return
        for start_id, crash in list(self._crashes.items()):
            if now_s - crash.began_s >= REFUSED_S:
                del self._crashes[start_id]
                self._forget(crash)
        for print_, until_s in list(self._refused.items()):
            if now_s >= until_s:
                del self._refused[print_]
        self._look()

    def export(self, now_s: float) -> list[tuple[int, float]]:
        """Return ``(fingerprint, until when)`` of those refused, for the other workers; at most ``SUSPECTS_MAX``.

        Workers of one machine share its monotonic clock, so what goes round does not grow older or younger.
        """
        return [(print_, until_s) for print_, until_s in self._refused.items() if until_s > now_s]

    def merge(self, refused: Iterable[tuple[int, float]], now_s: float) -> None:
        """Take over what another worker found out."""
        for print_, until_s in refused:
            if until_s > now_s:
                self._refuse(print_, min(until_s, now_s + REFUSED_S))

    def _judge(self, print_: int, now_s: float) -> bool:
        """Condemn the request if the evidence suffices; say whether it did."""
        crashes = self._by_print[print_]
        if len(crashes) < CRASHES_MIN:
            return False
        if not any(crash.was_alone(print_) for crash in crashes):
            if not all(crash.is_settled(now_s) for crash in crashes):
                # Somebody else who was there each time may not have been reported yet.
                return False
            if len(crashes) < CRASHES_BEGUN_MIN and not all(print_ in crash.waiting for crash in crashes):
                return False
            if len(set.intersection(*({*crash.waiting, *crash.begun} for crash in crashes))) > 1:
                return False
        self._refuse(print_, now_s + REFUSED_S)
        return True

    def _refuse(self, print_: int, until_s: float) -> None:
        self.has_any = True
        self._refused[print_] = max(until_s, self._refused.get(print_, 0.0))
        self._refused.move_to_end(print_)
        while len(self._refused) > SUSPECTS_MAX:
            self._refused.popitem(last=False)

    def _forget(self, crash: _Crash) -> None:
        for print_ in (*crash.waiting, *crash.begun):
            crashes = self._by_print.get(print_)
            if crashes is not None and crash in crashes:
                crashes.remove(crash)
                if not crashes:
                    del self._by_print[print_]

    def _look(self) -> None:
        self.has_any = bool(self._by_print or self._refused)
