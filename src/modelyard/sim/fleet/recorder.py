"""Counts what happens in the counted time of a run."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from modelyard.sim.fleet.backfill import OWN_SHARE
from modelyard.sim.fleet.population import Floats, Population
from modelyard.sim.fleet.scenario import Scenario
from modelyard.sim.fleet.tally import LATE_S, PROMPT_SHARES, PROMPTS, Histogram, Outcome

if TYPE_CHECKING:
    from modelyard.sim.fleet.world import World

SERIES_S = 600.0
KIND = "gpus."
"""Series of accelerators in use by kind begin so."""
_TIMES, _SHARES = np.array(PROMPTS), np.array(PROMPT_SHARES)
_SERIES = (
    "hours", "gpus", "online_busy", "total_busy", "rate", "late", "usd_per_hour", "ttft_p50_s", "ttft_p99_s",
    "replicas", "loading",
)  # fmt: skip
_WAITS, _THIRDS = np.array([0.0, 0.18, 0.69, 2.1]), np.array([0.0, 1 / 3, 1 / 3, 1 / 3])
"""An exponential wait as its three terciles, after those who do not wait."""
CUT_SHARE = 0.1
"""Streams of a lost replica that cannot go on from their text on another (ADR 0014: tools, log-probabilities, several
answers): an assumption."""


class Recorder:
    """Sums; nothing counts while ``is_counting`` is False."""

    def __init__(self, scenario: Scenario, population: Population) -> None:
        self._scenario = scenario
        self._accelerators = np.array([float(one.profile.accelerators) for one in population.deployments])
        self._capacity = np.array([one.profile.requests_s for one in population.deployments])
        self._is_llm = np.array([one.profile.is_llm for one in population.deployments])
        self._prompt_s = np.array([one.profile.prompt_s for one in population.deployments])
        self._population = population
        self.is_counting = False
        self.warm, self.other = Histogram(), Histogram()
        self.requests = self.late = self.dropped = self.failed = 0.0
        self.gpu_s = self.usd = self.busy_s = self.batch_busy_s = 0.0
        self.batch_came = np.zeros(len(self._capacity))
        self.batch_done = np.zeros(len(self._capacity))
        self.activations = self.wakes = 0.0
        self.starts = self.refused = self.decisions = self.looks = self.gpus_most = 0
        self.shared_looks = self.crowded = 0
        self.by_kind: dict[str, float] = {}
        self.series: dict[str, list[float]] = {name: [] for name in _SERIES}
        for group in scenario.nodes:
            self.series.setdefault(KIND + group.kind, [])
        self._mark = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._kind_mark: dict[str, float] = {}
        self._waits_mark = Histogram()
        self._mark_s = 0.0
        self._counted_s = 0.0

    # --- what others tell ----------------------------------------------------------------

    def asked(self, decisions: int, deployments: int) -> None:
        """Note how many decisions a tick needed, of how many."""
        if self.is_counting:
            self.decisions += decisions
            self.looks += deployments

    def activated(self, number: float) -> None:
        """Note endpoints whose requests met nothing ready."""
        self.activations += number * self.is_counting

    def woken(self, number: float) -> None:
        """Note endpoints whose requests met an engine that slept."""
        self.wakes += number * self.is_counting

    def turned(self, accelerator_s: float) -> None:
        """Note accelerators that are still held while an engine gives them back."""
        self.gpu_s += accelerator_s * self.is_counting

    def started(self) -> None:
        """Note a replica's start."""
        self.starts += self.is_counting

    def no_room(self) -> None:
        """Note a start that found no place."""
        self.refused += self.is_counting

    def turned_away(self, number: float) -> None:
        """Note requests that gave up, or found the line full."""
        if self.is_counting:
            self.dropped += number
            self.requests += number

    def cut(self, running: float, *, has_others: bool) -> None:
        """Note the requests on a replica that was lost."""
        if self.is_counting:
            self.failed += running * (CUT_SHARE if has_others else 1.0)

    def served(
        self, at: NDArray[np.int64], number: Floats, share: Floats, mean_s: Floats, held_s: Floats, first_s: Floats
    ) -> None:
        """Note requests that met a ready replica and no line; ``share`` of them waited ``mean_s`` within the tick."""
        if not self.is_counting:
            return
        self.requests += float(number.sum())
        self.late += float((number * share * np.exp(-LATE_S / np.maximum(mean_s, 1e-6))).sum())
        self.late += float(number[held_s > LATE_S].sum())
        # Prompts by their length, and of those who waited (exponentially) three terciles.
        base_s = (first_s - self._prompt_s[at] + held_s)[:, None] + self._prompt_s[at][:, None] * _TIMES
        waits_s = np.multiply.outer(mean_s, _WAITS)
        seconds = base_s[:, :, None] + waits_s[:, None, :]
        waiting = np.multiply.outer(share, _THIRDS)
        waiting[:, 0] = 1 - share
        counts = (number[:, None] * _SHARES)[:, :, None] * waiting[:, None, :]
        llm = self._is_llm[at]
        self.warm.add(seconds[llm].ravel(), counts[llm].ravel())
        self.other.add(seconds[~llm].ravel(), counts[~llm].ravel())

    def waited(self, at: int, waits: list[tuple[float, float]], first_s: float) -> None:
        """Note requests that stood in line."""
        if not self.is_counting:
            return
        for wait_s, number in waits:
            self.requests += number
            self.late += number * (wait_s > LATE_S)
            # Whoever met a replica waits no longer than its line allows; the rest waited for a load.
            is_warm = self._is_llm[at] and wait_s < self._scenario.queue_wait_s
            (self.warm if is_warm else self.other).add_one(wait_s + first_s, number)

    def filled(self, came: Floats, pace: Floats) -> None:
        """Note a tick of batches."""
        if self.is_counting:
            self.batch_came += came
            self.batch_done += pace * self._scenario.tick_s
            self.batch_busy_s += float((pace / self._capacity * self._accelerators).sum()) * self._scenario.tick_s

    def count(self, world: "World", now_s: float) -> None:
        """Note the state at the end of a tick."""
        if not self.is_counting:
            return
        tick_s, stock, columns = self._scenario.tick_s, world.stock, world.columns
        self._counted_s += tick_s
        self.gpu_s += (stock.accelerators + stock.slivers) * tick_s
        self.gpus_most = max(self.gpus_most, stock.accelerators)
        self.usd += stock.usd_per_hour / 3600 * tick_s
        load = np.minimum(columns.rate / self._capacity, columns.ready)
        self.busy_s += float((load * self._accelerators).sum()) * tick_s
        for kind, number in stock.in_use.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0.0) + number * tick_s / 3600
        if self._counted_s - self._mark_s >= SERIES_S:
            self._draw(world)

    def _draw(self, world: "World") -> None:
        """Add a point to each series."""
        mark = (self.gpu_s, self.busy_s, self.batch_busy_s, self.requests, self.late, self.usd)
        gpu_s, busy_s, batch_s, requests, late, usd = (new - old for new, old in zip(mark, self._mark, strict=True))
        passed_s = self._counted_s - self._mark_s
        self._mark, self._mark_s = mark, self._counted_s
        waits, self._waits_mark = self.warm - self._waits_mark, self.warm + Histogram()
        ready, live = float(world.columns.ready.sum()), float(world.columns.live.sum())
        points = (
            self._counted_s / 3600,
            gpu_s / passed_s,
            busy_s / max(gpu_s, 1e-9),
            (busy_s + batch_s) / max(gpu_s, 1e-9),
            requests / passed_s,
            late / max(requests, 1e-9),
            usd / passed_s * 3600,
            waits.quantile(0.5),
            waits.quantile(0.99),
            ready,
            live - ready,
        )
        for name, value in zip(_SERIES, points, strict=True):
            self.series[name].append(value)
        for name, column in self.series.items():
            if (kind := name.removeprefix(KIND)) != name:
                hours = self.by_kind.get(kind, 0.0)
                column.append((hours - self._kind_mark.get(kind, 0.0)) * 3600 / passed_s)
                self._kind_mark[kind] = hours

    def shared(self, loads: list[float]) -> None:
        """Note how much is asked of each shared accelerator."""
        if self.is_counting and loads:
            self.shared_looks += len(loads)
            self.crowded += sum(load > 1.0 for load in loads)

    # --- in the end ----------------------------------------------------------------------

    def outcome(self, world: "World") -> Outcome:
        """Return what it came to."""
        requests = max(self.requests, 1e-9)
        # What of a day's batches the fleet has not done meanwhile needs accelerators of its own.
        left = np.maximum(self.batch_came - self.batch_done, 0.0)
        own_s = float((left / self._capacity * self._accelerators).sum()) / OWN_SHARE
        held_s = max(self.gpu_s, 1e-9)
        return Outcome(
            endpoints=self._population.endpoints,
            deployments=len(self._capacity),
            hours=self._counted_s / 3600,
            requests=self.requests,
            online_gpu_hours=self.gpu_s / 3600,
            batch_gpu_hours=own_s / 3600,
            dedicated_gpu_hours=float(self._accelerators.sum()) * self._counted_s / 3600,
            usd=self.usd,
            gpus_most=self.gpus_most,
            online_busy=self.busy_s / held_s,
            total_busy=(self.busy_s + self.batch_busy_s + own_s * OWN_SHARE) / (held_s + own_s),
            late=self.late / requests,
            dropped=self.dropped / requests,
            failed=self.failed / requests,
            ttft_p50_s=self.warm.quantile(0.5),
            ttft_p99_s=self.warm.quantile(0.99),
            ttft_all_p99_s=(self.warm + self.other).quantile(0.99),
            activations=round(self.activations),
            moves=world.moves.made if world.moves is not None else 0,
            stolen=world.pools.stolen if world.pools is not None else 0,
            wakes=round(self.wakes),
            starts=self.starts,
            no_room=self.refused,
            evicted=world.room.evicted,
            decisions=self.decisions,
            looks=self.looks,
            batch_requests=float(self.batch_came.sum()),
            batch_done=float(self.batch_done.sum()),
            lost_nodes=world.events.failures,
            reclaimed=world.events.reclaims,
            crashes=world.events.crashes,
            contention=self.crowded / max(self.shared_looks, 1),
            by_kind=self.by_kind,
            series=self.series,
        )
