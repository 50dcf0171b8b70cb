"""Probes of running replicas: is it ready, does it live, how loaded is it.

One task a replica asks its readiness path and its metrics page; what that
means is decided by ``policy/vitality.py``. A change of verdict wakes the
reconciler at once. aiohttp costs a third of a second to import, so it comes
with the first replica and in a thread.
"""

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelyard.clock import Clock
from modelyard.control.tasks import boundary
from modelyard.domain.demand import ReplicaReport
from modelyard.engines import Engine, EngineLoad
from modelyard.policy.reconcile import Vital
from modelyard.policy.vitality import Probe, Pulse, first_pulse, judge

if TYPE_CHECKING:
    import aiohttp

LOADING_PAUSE_S = 0.1
"""Pause between looks at a loading replica: people wait for it."""
READY_PAUSE_MAX_S = 5.0
PROBES_IN_TIMEOUT = 3
"""Looks at a ready replica within one hang timeout; each may take as long as the pause between two."""
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


@dataclass(slots=True)
class _Watch:
    """What is known of one target."""

    target: Target
    pulse: Pulse
    vital: Vital = Vital.UNKNOWN
    reason: str = ""
    load: EngineLoad = _NO_LOAD
    has_served: bool = False
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
        self._failures: dict[tuple[str, str], int] = {}
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

    def note(self, gateway_id: str, reports: Iterable[ReplicaReport]) -> bool:
        """Take a gateway's view of replicas into account; say whether one got worse since its last report."""
        is_worse = False
        for report in reports:
            key = (gateway_id, report.replica_id)
            before = self._failures.get(key, 0)
            is_worse = is_worse or report.failures > before
            if report.failures < before and (watch := self._watches.get(report.replica_id)):
                watch.has_served = True
            if report.failures:
                self._failures[key] = report.failures
            else:
                self._failures.pop(key, None)
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
            if watch.vital in (Vital.LOADING, Vital.UNKNOWN):
                await asyncio.sleep(LOADING_PAUSE_S)
            else:
                await asyncio.sleep(self._pause_s)

    @property
    def _pause_s(self) -> float:
        return min(self._hang_timeout_s / PROBES_IN_TIMEOUT, READY_PAUSE_MAX_S)

    async def _look(self, watch: _Watch) -> None:
        """Ask once, both pages at a time, and judge."""
        target = watch.target
        session = await self._open_session()
        ready, page = await asyncio.gather(
            self._get(session, target, target.engine.ready_path),
            self._get(session, target, target.engine.load_path),
        )
        watch.load = _NO_LOAD if page is None else target.engine.read_load(page)
        has_served, watch.has_served = watch.has_served, False
        probe = Probe(
            now_s=self._clock.monotonic_s(),
            is_answering=ready is not None,
            running=watch.load.running,
            tokens=_tokens(watch.load),
            has_served=has_served,
        )
        verdict = judge(watch.pulse, probe, hang_timeout_s=self._hang_timeout_s, load_timeout_s=target.load_timeout_s)
        watch.pulse, watch.reason = verdict.pulse, verdict.reason
        if verdict.vital is not watch.vital:
            watch.vital = verdict.vital
            self._wake()

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


def _tokens(load: EngineLoad) -> float | None:
    """Every token an engine worked on, read or written; None where it counts neither."""
    if load.prompt_tokens_total is None and load.generation_tokens_total is None:
        return None
    return (load.prompt_tokens_total or 0.0) + (load.generation_tokens_total or 0.0)
