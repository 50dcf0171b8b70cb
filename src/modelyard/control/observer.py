"""Probes of running replicas: is it ready, does it live, how loaded is it.

One task a replica asks its readiness path and its metrics page; what that
means is decided by ``policy/vitality.py``. A change of verdict wakes the
reconciler at once. Replicas with requests are looked at every second, idle
ones every few, or rarer where there are thousands: looks must not keep a machine with many models busy. aiohttp
costs a third of a second to import, so it comes with the first replica and in
a thread.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelyard.clock import Clock
from modelyard.control.tasks import boundary
from modelyard.domain.demand import ReplicaReport
from modelyard.domain.routing_table import ReplicaSnapshot
from modelyard.engines import Engine, EngineLoad
from modelyard.policy.reconcile import Vital
from modelyard.policy.vitality import Probe, Pulse, first_pulse, judge, stall_limit_s

if TYPE_CHECKING:
    import aiohttp

LOADING_PAUSE_S = 0.1
"""Pause between looks at a loading replica: people wait for it."""
IDLE_PAUSE_MAX_S = 5.0
IDLE_LOOKS_PER_S = 50.0
"""Looks at idle replicas in all: with thousands of them each is looked at less often, but the first request for one
makes it busy, and a look that failed is followed up at the usual pace."""
BUSY_PAUSE_MAX_S = 1.0
"""Pause between looks at a replica that has requests: what they learn steers requests and finds hangs."""
IDLE_SHARE_MAX = 0.7
PAUSE_MIN_S = 0.02
PROBES_IN_TIMEOUT = 3
"""Looks at a ready replica within one hang timeout; each may take as long as the pause between two."""
MODELS_PATH = "/v1/models"
PAGE_BYTES_MAX = 1024 * 1024
_NO_LOAD = EngineLoad()


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to watch; one that moved to another port is watched anew."""

    replica_id: str
    host: str
    port: int
    secret: str
    engine: Engine
    load_timeout_s: float
    has_guests: bool = False
    """It takes guests in, and is asked which it has."""


@dataclass(slots=True)
class _Watch:
    """What is known of one target."""

    target: Target
    pulse: Pulse
    vital: Vital = Vital.UNKNOWN
    reason: str = ""
    load: EngineLoad = _NO_LOAD
    looked_s: float = 0.0
    guests: tuple[float, frozenset[str]] | None = None
    """The guests that it said it has, and when it was asked."""
    has_news: bool = False
    """``load`` was not told to gateways yet."""
    has_served: bool = False
    is_busy: bool = False
    is_answering: bool = False
    """The last look found it ready."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a look: what one finds is never overtaken by what an earlier one found."""
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    """It got something to do: look now."""
    task: asyncio.Task[None] | None = None


class Observer:
    """Watches replicas with tasks in ``group``."""

    def __init__(
        self, group: asyncio.TaskGroup, clock: Clock, *, hang_timeout_s: float, wake: Callable[[], None]
    ) -> None:
        self._group = group
        self._clock = clock
        self._hang_timeout_s = hang_timeout_s
        self._wake = wake
        self._watches: dict[str, _Watch] = {}
        self._reports: dict[str, dict[str, ReplicaReport]] = {}
        """By gateway, then by replica."""
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<Observer of {len(self._watches)} replicas>"

    def watch(self, targets: Iterable[tuple[Target, bool]]) -> None:
        """Watch exactly these; the flag says whether a replica was ready before."""
        wanted = {target.replica_id: (target, was_ready) for target, was_ready in targets}
        for replica_id, watch in list(self._watches.items()):
            if replica_id not in wanted or wanted[replica_id][0].port != watch.target.port:
                del self._watches[replica_id]
                assert watch.task is not None, "a watch has a task from its first moment"
                watch.task.cancel()
        for replica_id, (target, was_ready) in wanted.items():
            if replica_id not in self._watches:
                watch = _Watch(target, first_pulse(self._clock.monotonic_s(), was_ready=was_ready))
                self._watches[replica_id] = watch
                watch.task = self._group.create_task(self._follow(watch), name=f"observe {replica_id}")

    def vital(self, replica_id: str) -> tuple[Vital, str]:
        """Return what is known of a replica, and why."""
        watch = self._watches.get(replica_id)
        return (watch.vital, watch.reason) if watch else (Vital.UNKNOWN, "")

    def loads(self) -> Mapping[str, EngineLoad]:
        """Return the last load of each replica by its id."""
        return {replica_id: watch.load for replica_id, watch in self._watches.items()}

    def latest(self, replica_id: str) -> tuple[float, EngineLoad] | None:
        """Return the last load of a replica and the (monotonic) moment at which its page was read."""
        watch = self._watches.get(replica_id)
        return (watch.looked_s, watch.load) if watch is not None and watch.looked_s else None

    async def ask(self, replica_id: str) -> EngineLoad | None:
        """Look at a replica now; return its load, None where it does not answer, or is not watched."""
        if (watch := self._watches.get(replica_id)) is None:
            return None
        await self._look(watch)
        return watch.load if watch.is_answering else None

    def guests(self, replica_id: str) -> tuple[float, frozenset[str]] | None:
        """Return the guests that a replica said it has and the (monotonic) moment at which it was asked."""
        watch = self._watches.get(replica_id)
        return watch.guests if watch is not None else None

    def is_missing(self, seat_id: str) -> bool:
        """Say whether a gateway was told by an engine that it does not have the guest of this seat."""
        return any(report.failures > 0 for report in self._reports_on(seat_id))

    def snapshots(self) -> list[ReplicaSnapshot]:
        """Return what metrics pages said since the last call; each is told once, for an old one would mislead."""
        now_s = self._clock.monotonic_s()
        news = [watch for watch in self._watches.values() if watch.has_news]
        for watch in news:
            watch.has_news = False
        return [
            ReplicaSnapshot(
                watch.target.replica_id,
                round(now_s - watch.looked_s, 3),
                watch.load.running,
                watch.load.waiting,
                watch.load.kv_usage,
            )
            for watch in news
        ]

    def note(self, gateway_id: str, reports: Sequence[ReplicaReport]) -> bool:
        """Take a gateway's view of replicas into account; say whether one got worse since its last report."""
        before = self._reports.get(gateway_id, {})
        self._reports[gateway_id] = {report.replica_id: report for report in reports}
        if not reports:
            del self._reports[gateway_id]  # it may have left for good
        is_worse = False
        for report in reports:
            earlier = before.get(report.replica_id)
            failures = earlier.failures if earlier else 0
            is_worse = is_worse or report.failures > failures
            watch = self._watches.get(report.replica_id)
            if watch is None:
                continue
            if report.failures < failures:
                watch.has_served = True
            if report.in_flight and not watch.is_busy:
                watch.is_busy = True
                watch.stirred.set()
        return is_worse

    async def close(self) -> None:
        """Give back connections; the tasks end with their group."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _follow(self, watch: _Watch) -> None:
        while True:
            with boundary(f"the probe of {watch.target.replica_id}"):
                await self._look(watch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(watch)):
                    await watch.stirred.wait()
            watch.stirred.clear()

    def _pause_s(self, watch: _Watch) -> float:
        if watch.vital in (Vital.LOADING, Vital.UNKNOWN):
            return LOADING_PAUSE_S
        if not watch.is_busy:
            pause_s = min(self._hang_timeout_s / PROBES_IN_TIMEOUT, IDLE_PAUSE_MAX_S)
            if not watch.is_answering:
                return pause_s
            # Not so rarely that one lost answer could pass for a hang timeout of silence.
            return max(pause_s, min(len(self._watches) / IDLE_LOOKS_PER_S, self._hang_timeout_s * IDLE_SHARE_MAX))
        # Be there at the moment at which silence becomes a hang.
        limit_s = stall_limit_s(self._hang_timeout_s, self._reading(watch.target.replica_id))
        left_s = watch.pulse.moved_s + limit_s - self._clock.monotonic_s()
        pause_s = min(self._hang_timeout_s / PROBES_IN_TIMEOUT, BUSY_PAUSE_MAX_S)
        return max(PAUSE_MIN_S, left_s) if 0 < left_s < pause_s else pause_s

    def _reports_on(self, replica_id: str) -> list[ReplicaReport]:
        return [found for reports in self._reports.values() if (found := reports.get(replica_id))]

    def _reading(self, replica_id: str) -> int | None:
        """Return the tokens of prompts that a replica may still have to read, as far as gateways say."""
        said = [report.reading for report in self._reports_on(replica_id) if report.reading is not None]
        return sum(said) if said else None

    async def _look(self, watch: _Watch) -> None:
        """Ask once and judge."""
        async with watch.turn:
            await self._look_once(watch)

    async def _look_once(self, watch: _Watch) -> None:
        target = watch.target
        session = await self._open_session()
        ready, page = await self._pages(session, watch)
        watch.load = _NO_LOAD if page is None else target.engine.read_load(page)
        watch.is_answering = ready is not None
        if target.has_guests and watch.is_answering:
            await self._ask_for_guests(session, watch)
        watch.looked_s, watch.has_news = self._clock.monotonic_s(), page is not None
        sent = sum(report.in_flight for report in self._reports_on(target.replica_id))
        watch.is_busy = bool(watch.load.running or watch.load.waiting or sent)
        has_served, watch.has_served = watch.has_served, False
        probe = Probe(
            now_s=watch.looked_s,
            is_answering=watch.is_answering,
            running=watch.load.running,
            progress=watch.load.progress_total,
            has_served=has_served,
            reading=self._reading(target.replica_id),
        )
        verdict = judge(watch.pulse, probe, hang_timeout_s=self._hang_timeout_s, load_timeout_s=target.load_timeout_s)
        watch.pulse, watch.reason = verdict.pulse, verdict.reason
        if verdict.vital is not watch.vital:
            watch.vital = verdict.vital
            self._wake()

    async def _ask_for_guests(self, session: "aiohttp.ClientSession", watch: _Watch) -> None:
        """Ask which guests it has; one that it lost is news."""
        asked_s, before = self._clock.monotonic_s(), watch.guests
        page = await self._get(session, watch.target, MODELS_PATH)
        if page is None:
            return
        names = watch.target.engine.read_guests(page)
        watch.guests = asked_s, names
        if before is not None and before[1] - names:
            self._wake()

    async def _pages(self, session: "aiohttp.ClientSession", watch: _Watch) -> tuple[str | None, str | None]:
        """Return the readiness and the metrics page."""
        target = watch.target
        if watch.is_answering and not watch.is_busy:
            # Nobody waits for it: one after the other, over one connection. Opening it costs more than the pages do.
            ready = await self._get(session, target, target.engine.ready_path)
            return ready, await self._get(session, target, target.engine.load_path) if ready is not None else None
        return await asyncio.gather(
            self._get(session, target, target.engine.ready_path),
            self._get(session, target, target.engine.load_path),
        )

    async def _open_session(self) -> "aiohttp.ClientSession":
        aiohttp = await asyncio.to_thread(importlib.import_module, "aiohttp") if self._session is None else None
        if self._session is None and aiohttp is not None:  # another watch may have opened it meanwhile
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        assert self._session is not None, "opened above"
        return self._session

    async def _get(self, session: "aiohttp.ClientSession", target: Target, path: str) -> str | None:
        """Return the page, None for anything but a 200 in time."""
        from aiohttp import ClientError

        url = f"http://{target.host}:{target.port}{path}"
        headers = {"authorization": f"Bearer {target.secret}"}
        # As long as it may take: a saturated engine answers late, and that alone must not get it killed.
        limit_s = self._hang_timeout_s / PROBES_IN_TIMEOUT
        try:
            async with asyncio.timeout(limit_s), session.get(url, headers=headers, allow_redirects=False) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > PAGE_BYTES_MAX:
                        return None
                return body.decode("utf-8", "replace") if response.status == 200 else None
        except (ClientError, OSError, TimeoutError):
            return None
