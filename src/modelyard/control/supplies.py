"""What a version needs before a replica of it can start: its engine, good options, its artifact.

``supply`` never waits: it says what is there and begins a fetch, or the check
of what an earlier controller fetched, beside the loops if one is due.
A failure is remembered and retried with a growing pause, so that a file put
right later heals by itself and nothing loops hot meanwhile.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelyard.clock import Clock
from modelyard.control.artifacts import ArtifactError, ArtifactStore
from modelyard.control.tasks import KeyedTasks
from modelyard.domain.catalog import Artifact, ModelVersion
from modelyard.domain.endpoints import Stage
from modelyard.domain.facts import ModelFacts
from modelyard.engines import Engine, Engines, Settings
from modelyard.formats import ArtifactInvalidError
from modelyard.formats.folder import facts_of
from modelyard.policy.progress import Fetch
from modelyard.stores import ControlStore

_READ_TIMEOUT_S = 30.0
"""Reading headers takes milliseconds; a network file system may hang."""


class SupplyError(Exception):
    """Why no replica of a version can start, in our words; ``attempts`` to change that failed, None: none can help.

    ``again`` says when the next one is: a time of day, as text that changed each second would be written as often.
    """

    def __init__(self, reason: str, *, attempts: int | None = None, again: str = "") -> None:
        super().__init__(reason)
        self.attempts = attempts
        self.told = f"{reason.removesuffix('.')}; it is tried again {again}" if again else reason


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known of a version before anything is fetched: who would run it, and what that takes."""

    version: ModelVersion
    engine: Engine
    settings: Settings


@dataclass(frozen=True, slots=True)
class Supplied:
    """Everything is there. ``version`` has the digest and size of its artifact, and the facts of its header."""

    version: ModelVersion
    engine: Engine
    settings: Settings
    artifact: Path | None
    fetched_s: float | None = None
    """Seconds that its artifact took to get here, for the first start after that; None: it was here."""


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
    """When it is tried again, by the monotonic clock."""
    again: str


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
        self._learned: dict[str, tuple[Artifact, ModelFacts, int]] = {}
        """Of each version that was fetched: its artifact, facts, and bytes of memory."""
        self._fetched_s: dict[str, float] = {}

    def known(self, version: ModelVersion) -> ModelVersion:
        """Return ``version`` with what was learned of its artifact since it was read."""
        if (learned := self._learned.get(version.id)) is None:
            return version
        artifact, facts, memory_bytes = learned
        # Whoever writes the version next must not undo what the fetch wrote.
        return msgspec.structs.replace(version, artifact=artifact, facts=facts, memory_bytes=memory_bytes)

    def settings(self, version: ModelVersion) -> Settings | None:
        """Return what the engine makes of the version, None when it cannot say."""
        try:
            return self._settings(self._engine(version), self.known(version))
        except SupplyError:
            return None

    def offer(self, version: ModelVersion) -> Offer:
        """Return who would run ``version``, and what that takes.

        Raises:
            SupplyError: nobody can.
        """
        engine = self._engine(version)
        if missing := engine.missing():
            raise SupplyError(missing)
        version = self.known(version)
        return Offer(version, engine, self._settings(engine, version))

    def supply(self, version: ModelVersion) -> Supplied | Fetch:
        """Return what a replica of ``version`` needs, or how far its fetch is.

        Raises:
            SupplyError: it cannot be had.
        """
        offer = self.offer(version)
        version, engine, settings = offer.version, offer.engine, offer.settings
        # An adapter has files even where the engine's own models have none, if it was given some.
        if not engine.needs_artifact and not (version.base_id and version.artifact.uri):
            return Supplied(version, engine, settings, None)
        file = self._artifacts.path(version.artifact)
        if file is not None and version.facts.format:
            self._artifacts.note_use(version.artifact, self._clock.unix_s())
            return Supplied(version, engine, settings, file, self._fetched_s.pop(version.id, None))
        if copying := self._copying.get(version.id):
            return _fetch_of(copying, self._clock.monotonic_s())
        failed = self._failed.get(version.id)
        if failed is not None and self._clock.monotonic_s() < failed.retry_s:
            raise SupplyError(failed.reason, attempts=failed.times, again=failed.again)
        self._copying[version.id] = copying = _Copying(self._clock.monotonic_s())
        self._tasks.spawn(f"fetch {version.id}", lambda: self._fetch(engine, version, copying))
        if failed is not None:
            # Still the truth until the new try says otherwise.
            raise SupplyError(failed.reason, attempts=failed.times, again="now")
        return _fetch_of(copying, self._clock.monotonic_s())

    async def _fetch(self, engine: Engine, version: ModelVersion, copying: _Copying) -> None:
        """Bring the artifact here, unless it is, and read what its header says."""

        def progressed(stage: Stage, done: int, whole: int) -> None:
            copying.progressed(stage, done, whole, self._clock.monotonic_s())

        try:
            # What an engine says of models is not said of adapters: those are known by their headers.
            check = _accept if version.base_id else engine.check_artifact
            artifact = await self._artifacts.fetch(version.artifact, check, progressed)
            copying.stage = Stage.VERIFYING
            facts = await self._facts(version, artifact)
            fetched = msgspec.structs.replace(version, artifact=artifact, facts=facts)
            settings = self._settings(engine, fetched)
        except (ArtifactError, ArtifactInvalidError, SupplyError) as error:
            self._fail(version, _reason(error))
            return
        finally:
            del self._copying[version.id]
        self._failed.pop(version.id, None)
        self._learned[version.id] = artifact, facts, settings.memory_bytes
        self._fetched_s[version.id] = self._clock.monotonic_s() - copying.begun_s
        if (artifact, facts) == (version.artifact, version.facts):
            return  # it was here, and was verified
        await self._store.put_version(msgspec.structs.replace(fetched, memory_bytes=settings.memory_bytes))

    async def _facts(self, version: ModelVersion, artifact: Artifact) -> ModelFacts:
        path = self._artifacts.path(artifact)
        if path is None:
            raise ArtifactError(f"the artifact {artifact.uri} has gone again")
        files = {one.path: path / one.path for one in artifact.files} or {"model": path}
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                facts = await asyncio.to_thread(facts_of, files)
        except TimeoutError as error:
            raise ArtifactError(f"the artifact {artifact.uri} could not be read in {_READ_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ArtifactError(f"the artifact {artifact.uri} cannot be read: {error.strerror or error}") from error
        if facts.is_adapter and not version.base_id:
            raise SupplyError(lone_adapter(facts))
        if version.base_id and not facts.is_adapter:
            raise SupplyError(NO_ADAPTER)
        return facts

    def _fail(self, version: ModelVersion, reason: str) -> None:
        times = self._failed[version.id].times + 1 if version.id in self._failed else 1
        pause_s = min(self._pause_s * 2.0 ** min(times - 1, 30), self._pause_max_s)
        again = time.strftime("at %H:%M:%S UTC", time.gmtime(math.ceil(self._clock.unix_s() + pause_s)))
        self._failed[version.id] = _Failed(reason, times, self._clock.monotonic_s() + pause_s, again)

    def _engine(self, version: ModelVersion) -> Engine:
        engine = self._engines.get(version.framework)
        if engine is None:
            raise SupplyError(
                f"there is no engine '{version.framework}' here; there are {_listed(list(self._engines))}"
            )
        return engine

    @staticmethod
    def _settings(engine: Engine, version: ModelVersion) -> Settings:
        if version.base_id:
            return adapter_settings(version.artifact.size_bytes)
        try:
            return engine.settings(version.options, artifact_bytes=version.artifact.size_bytes, facts=version.facts)
        except ValueError as error:
            raise SupplyError(str(error)) from error


NO_ADAPTER = "it is no LoRA adapter: a folder of PEFT's has adapter_config.json beside the weights"
ADAPTER_LOAD_S = 0.5
"""Estimated time of loading an adapter, before any was measured."""


def adapter_settings(size_bytes: int) -> Settings:
    """Return what an adapter takes: slots and KV cache are its base's."""
    return Settings(slots=1, context_length=0, memory_bytes=size_bytes, load_s=ADAPTER_LOAD_S)


def _accept(_file: Path) -> None:
    """Accept anything: its header is read next."""


def lone_adapter(facts: ModelFacts) -> str:
    """Return why an adapter is not served by itself."""
    base = f" of '{facts.adapter_base}'" if facts.adapter_base else ""
    return f"it is a LoRA adapter{base}, which is loaded onto a version of its base and not by itself"


def _reason(error: Exception) -> str:
    """Return why a fetch failed; of what is no model, with the code that says so."""
    is_invalid = isinstance(error, ArtifactInvalidError) or isinstance(error.__cause__, ArtifactInvalidError)
    return f"{ArtifactInvalidError.code}: {error}" if is_invalid else str(error)


def _fetch_of(copying: _Copying, now_s: float) -> Fetch:
    done, whole = copying.done, copying.whole
    got, elapsed_s = done - max(copying.first, 0), now_s - copying.begun_s
    bytes_per_s = got / elapsed_s if got > 0 and elapsed_s > 0 else None
    left_s = (whole - done) / bytes_per_s if bytes_per_s else None
    return Fetch(copying.stage, 100 * done // whole if whole else 0, left_s, bytes_per_s)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
