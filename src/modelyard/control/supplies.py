"""What a version needs before a replica of it can start: its engine, good options, its artifact.

``supply`` never waits: it says what is there and begins a fetch, or the check
of what an earlier controller fetched, beside the loops if one is due.
A failure is remembered and retried with a growing pause, so that a file put
right later heals by itself and nothing loops hot meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.control.artifacts import ArtifactError, ArtifactStore
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Stage
from modelyard.engines import Engine, Engines, Settings
from modelyard.policy.progress import Fetch
from modelyard.stores import ControlStore


class SupplyError(Exception):
    """Why no replica of a version can start, in our words."""


@dataclass(frozen=True, slots=True)
class Supplied:
    """Everything is there. ``version`` has the digest and size of its artifact."""

    version: ModelVersion
    engine: Engine
    settings: Settings
    artifact: Path | None


@dataclass(slots=True)
class _Copying:
    """A fetch under way; the numbers are written by its thread."""

    begun_s: float
    stage: Stage = Stage.DOWNLOADING
    done: int = 0
    whole: int = 0
    first: int = -1
    """What was here already when the stage began: it says nothing of the pace."""

    def progressed(self, stage: Stage, done: int, whole: int, now_s: float) -> None:
        if stage is not self.stage or self.first < 0:
            self.first, self.begun_s = done, now_s
        self.stage, self.done, self.whole = stage, done, whole


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str
    times: int
    retry_s: float


class Supplies:
    """Engines and artifacts for versions."""

    def __init__(
        self,
        *,
        store: ControlStore,
        engines: Engines,
        artifacts: ArtifactStore,
        tasks: KeyedTasks,
        clock: Clock,
        pauses_s: tuple[float, float],
    ) -> None:
        self._store = store
        self._engines = engines
        self._artifacts = artifacts
        self._tasks = tasks
        self._clock = clock
        self._pause_s, self._pause_max_s = pauses_s
        self._copying: dict[str, _Copying] = {}
        self._failed: dict[str, _Failed] = {}
        self._fetched: dict[str, Artifact] = {}

    def known(self, version: ModelVersion) -> ModelVersion:
        """Return ``version`` with what was learned of its artifact since it was read."""
        return msgspec.structs.replace(version, artifact=self._fetched.get(version.id, version.artifact))

    def settings(self, version: ModelVersion) -> Settings | None:
        """Return what the engine makes of the version, None when it cannot say."""
        try:
            return self._settings(self._engine(version), version)
        except SupplyError:
            return None

    def supply(self, version: ModelVersion) -> Supplied | Fetch:
        """Return what a replica of ``version`` needs, or how far its fetch is.

        Raises:
            SupplyError: it cannot be had.
        """
        engine = self._engine(version)
        if missing := engine.missing():
            raise SupplyError(missing)
        version = self.known(version)
        settings = self._settings(engine, version)
        if not engine.needs_artifact:
            return Supplied(version, engine, settings, None)
        if file := self._artifacts.path(version.artifact):
            self._artifacts.note_use(version.artifact, self._clock.unix_s())
            return Supplied(version, engine, settings, file)
        if copying := self._copying.get(version.id):
            return _fetch_of(copying, self._clock.monotonic_s())
        failed = self._failed.get(version.id)
        if failed is not None and self._clock.monotonic_s() < failed.retry_s:
            raise SupplyError(failed.reason)
        self._copying[version.id] = copying = _Copying(self._clock.monotonic_s())
        self._tasks.spawn(f"fetch {version.id}", lambda: self._fetch(engine, version, copying))
        if failed is not None:
            raise SupplyError(failed.reason)  # still the truth until the new try says otherwise
        return _fetch_of(copying, self._clock.monotonic_s())

    async def _fetch(self, engine: Engine, version: ModelVersion, copying: _Copying) -> None:
        def progressed(stage: Stage, done: int, whole: int) -> None:
            copying.progressed(stage, done, whole, self._clock.monotonic_s())

        try:
            artifact = await self._artifacts.fetch(version.artifact, engine.check_artifact, progressed)
        except ArtifactError as error:
            times = self._failed[version.id].times + 1 if version.id in self._failed else 1
            pause_s = min(self._pause_s * 2.0 ** min(times - 1, 30), self._pause_max_s)
            self._failed[version.id] = _Failed(str(error), times, self._clock.monotonic_s() + pause_s)
            return
        finally:
            del self._copying[version.id]
        self._failed.pop(version.id, None)
        self._fetched[version.id] = artifact
        if artifact == version.artifact:
            return  # it was here, and was verified
        fetched = msgspec.structs.replace(version, artifact=artifact)
        memory_bytes = self._settings(engine, fetched).memory_bytes
        await self._store.put_version(msgspec.structs.replace(fetched, memory_bytes=memory_bytes))

    def _engine(self, version: ModelVersion) -> Engine:
        engine = self._engines.get(version.framework)
        if engine is None:
            raise SupplyError(
                f"there is no engine '{version.framework}' here; there are {_listed(list(self._engines))}"
            )
        return engine

    @staticmethod
    def _settings(engine: Engine, version: ModelVersion) -> Settings:
        try:
            return engine.settings(version.options, artifact_bytes=version.artifact.size_bytes)
        except ValueError as error:
            raise SupplyError(str(error)) from error


def _fetch_of(copying: _Copying, now_s: float) -> Fetch:
    done, whole = copying.done, copying.whole
    got, elapsed_s = done - max(copying.first, 0), now_s - copying.begun_s
    bytes_per_s = got / elapsed_s if got > 0 and elapsed_s > 0 else None
    left_s = (whole - done) / bytes_per_s if bytes_per_s else None
    return Fetch(copying.stage, 100 * done // whole if whole else 0, left_s, done, whole, bytes_per_s)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
