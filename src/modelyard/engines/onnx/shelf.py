"""The models of a process: loaded off the loop, accounted in bytes, evicted when room is short, loaded again on demand.

A model that cannot be loaded is refused with the reason; those that serve do not notice.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelyard.clock import Clock
from modelyard.engines.onnx.artifact import files_at
from modelyard.engines.onnx.metrics import Metrics, resident_bytes
from modelyard.engines.onnx.model import Model, load_model
from modelyard.engines.onnx.options import OnnxOptions
from modelyard.engines.onnx.refusals import Refused
from modelyard.engines.onnx.residency import Resident, make_room
from modelyard.engines.onnx.scheduler import Scheduler
from modelyard.formats import ArtifactInvalidError

_SPARE_BYTES = 8 * 1024 * 1024
_MIB = 1024 * 1024
_SPARE_SHARE = 0.15
"""What a model needs beyond its weights, before it was measured."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Known:
    """A model that may be asked for. ``resident`` is None while it is not in memory."""

    name: str
    place: Path
    options: OnnxOptions
    is_guest: bool
    model: Model | None = None
    resident: Resident | None = None
    uses: int = 0
    was_loaded: bool = False
    """It has been in memory, so it can be again."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a use ends."""


class Shelf:
    """All models by name. ``limit_bytes``: what the whole process may take; 0: not limited."""

    def __init__(
        self, scheduler: Scheduler, metrics: Metrics, clock: Clock, *, threads: int, guests_max: int, limit_bytes: int
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._threads = threads
        self._guests_max = guests_max
        self._limit_bytes = limit_bytes
        self._known: dict[str, Known] = {}
        self._one_at_a_time = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._base_bytes = 0

    def __repr__(self) -> str:
        return f"<Shelf {sum(known.model is not None for known in self._known.values())} of {len(self._known)} loaded>"

    def all(self) -> list[Known]:
        """Return all models that were loaded, also those that were evicted since."""
        return [known for known in self._known.values() if known.was_loaded]

    async def add_main(self, name: str, place: Path, options: OnnxOptions) -> None:
        """Load the model that the process is for.

        Raises:
            ArtifactInvalidError: it cannot be.
            OSError: it cannot be read.
        """
        known = Known(name, place, options, is_guest=False)
        await self._load(known)
        self._known[name] = known

    async def add_guest(self, name: str, place: Path, options: OnnxOptions) -> None:
        """Take in a further model; for one that is there already nothing is done.

        Raises:
            Refused: another one has its name, there are too many, it is no model, or memory does not suffice.
        """
        known = self._known.get(name)
        if known is not None:
            if (known.place, known.options, known.is_guest) != (place, options, True):
                raise Refused(
                    409, "model_exists", f"Another model is called '{name}'. Unload it, or choose another name."
                )
        elif sum(one.is_guest for one in self._known.values()) >= self._guests_max:
            raise Refused(
                409, "too_many_guests",
                f"This replica takes in {self._guests_max} models (option 'guests'). Unload one first.",
            )  # fmt: skip
        else:
            known = self._known[name] = Known(name, place, options, is_guest=True)
        try:
            await self._loaded(known)
        except BaseException:
            if not known.was_loaded and self._known.get(name) is known:
                del self._known[name]
            raise

    async def remove(self, name: str) -> None:
        """Forget a guest when what is computed for it is finished.

        Raises:
            Refused: there is none of this name, or it is what the process is for.
        """
        known = self._known.get(name)
        if known is None:
            raise _unknown(name)
        if not known.is_guest:
            raise Refused(409, "not_a_guest", f"'{name}' is what this replica is for; stop the replica instead.")
        del self._known[name]  # nothing new is taken for it
        try:
            while known.uses:
                known.left.clear()
                await known.left.wait()  # its caller has a timeout, and so has who uses it
            async with self._one_at_a_time:
                await self._drop(known)
        except asyncio.CancelledError:
            # Whoever asked gave up: what still takes memory must be found by who asks again.
            if known.model is not None:
                self._known.setdefault(name, known)
            raise

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Model]:
        """Give the model ``name``, loaded, and keep it in memory meanwhile.

        Raises:
            Refused: 404 for no such model, 503 when it was evicted and there is no room for it now.
        """
        known = self._known.get(name)
        if known is None:
            raise _unknown(name)
        known.uses += 1
        try:
            model = known.model or await self._loaded(known)
            if known.resident is not None:
                known.resident.used_s = self._clock.monotonic_s()
            yield model
        finally:
            known.uses -= 1
            known.left.set()

    def close(self) -> None:
        """End the thread that loads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _loaded(self, known: Known) -> Model:
        if known.model is not None:
            return known.model
        try:
            return await self._load(known)
        except ArtifactInvalidError as error:
            raise Refused(400, "artifact_invalid", f"The model '{known.name}' cannot be loaded: {error}") from None
        except OSError as error:
            message = f"The model '{known.name}' cannot be read: {error.strerror or error}."
            raise Refused(400, "artifact_unreadable", message) from None

    async def _load(self, known: Known) -> Model:
        async with self._one_at_a_time:  # so that what each takes can be measured
            if known.model is not None:
                return known.model
            loop = asyncio.get_running_loop()
            known.uses += 1
            try:
                await loop.run_in_executor(self._pool, _import_all)
                estimate = await loop.run_in_executor(self._pool, _estimated_bytes, known.place)
                await self._make_room(known, estimate)
                before = resident_bytes()
                self._base_bytes = self._base_bytes or before
                model = await loop.run_in_executor(
                    self._pool, load_model, known.name, known.place, known.options, self._threads
                )
                taken = max(model.artifact.facts.weights_bytes, resident_bytes() - before)
                known.resident = Resident(known.name, taken, self._clock.monotonic_s(), is_pinned=not known.is_guest)
                known.model = model
                self._scheduler.enter(model)
                self._metrics.memory.labels(known.name).set(taken)
                self._metrics.tokens.labels(known.name)  # 0 is a measurement, too
                await self._make_room(known, 0)
            except BaseException:
                self._metrics.loads.labels("failed").inc()
                await self._drop(known)
                raise
            finally:
                known.uses -= 1
                known.left.set()
            known.was_loaded = True
            self._metrics.loads.labels("ok").inc()
            _log.info("loaded %r: %d MiB", model, taken // _MIB)
            return model

    async def _make_room(self, known: Known, needed: int) -> None:
        """Evict guests until ``known`` fits; the model that the process is for is loaded whatever it takes."""
        others = [one for one in self._known.values() if one is not known]
        residents = [known.resident] if known.resident is not None else []
        for one in others:
            if one.resident is not None:
                one.resident.uses = one.uses
                residents.append(one.resident)
        if known.resident is not None:
            known.resident.uses = known.uses
        room = make_room(residents, needed_bytes=needed, limit_bytes=self._limit_bytes, base_bytes=self._base_bytes)
        if room.lacking_bytes and known.is_guest:
            raise Refused(
                503, "insufficient_memory",
                f"The model '{known.name}' does not fit: {room.lacking_bytes // _MIB + 1} MiB are missing of the "
                f"{self._limit_bytes // _MIB} MiB that this replica was given. Raise its option 'guests_mib'.",
            )  # fmt: skip
        for one in others:
            if one.name in room.evict and not one.uses:  # somebody may have begun while others left
                self._metrics.evictions.inc()
                _log.info("evicted '%s' for '%s'", one.name, known.name)
                await self._drop(one)

    async def _drop(self, known: Known) -> None:
        """Take a model out of memory; it may stay known."""
        known.resident = None
        if known.model is None:
            return
        model, known.model = known.model, None
        if not self._scheduler.leave(model):
            return  # another of its name has come since, with its own numbers
        with contextlib.suppress(KeyError):
            self._metrics.forget(known.name)
        await asyncio.get_running_loop().run_in_executor(self._pool, _give_back)


def _import_all() -> None:
    """Import what models need, so that none is charged for it."""
    import numpy
    import onnxruntime
    import PIL.Image
    import tokenizers

    del numpy, onnxruntime, PIL, tokenizers


def _give_back() -> None:
    """Let the system have the memory of what was dropped; glibc would keep it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _estimated_bytes(place: Path) -> int:
    weights = sum(file.stat().st_size for file in files_at(place).values())
    return int(weights * (1 + _SPARE_SHARE)) + _SPARE_BYTES


def _unknown(name: str) -> Refused:
    return Refused(404, "model_not_found", f"There is no model '{name[:256]}' here.", "model")
