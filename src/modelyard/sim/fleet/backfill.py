"""Batches on what is idle: lines of a model fill the free capacity of its ready replicas, and give way at once.

``policy/batch_pace.py`` finds the room line by line: it sends more while answers come soon, and less where lines wait
or give way. Its steady state is what is used here: all capacity but ``MARGIN`` that nobody in real time uses. What is
left at the end is charged as accelerators of its own, at the same speed, or a run could put all of it off.
"""

from typing import TYPE_CHECKING

import numpy as np

from modelyard.sim.fleet.population import Population
from modelyard.sim.fleet.scenario import Scenario

if TYPE_CHECKING:
    from modelyard.sim.fleet.columns import Columns
    from modelyard.sim.fleet.recorder import Recorder

MARGIN = 0.05
"""Capacity that batches leave alone."""
OWN_SHARE = 0.95
"""How busy accelerators are that do batches only."""


class Backfill:
    """What batches still ask for, by deployment, in requests."""

    def __init__(self, scenario: Scenario, population: Population) -> None:
        rates = np.array([one.mean_rate if one.profile.is_llm else 0.0 for one in population.deployments])
        self.per_s = rates * scenario.traffic.batch_share
        self._tick_s = scenario.tick_s
        self._is_on = scenario.measures.backfill
        self._is_demand = scenario.rules.batch_scales
        self.left = np.zeros(len(rates))
        self.pace = np.zeros(len(rates))
        """Requests/s of batches that run now."""
        self.beside = np.zeros(len(rates))
        """Lines of batches on each replica."""

    def fill(self, columns: "Columns", recorder: "Recorder") -> None:
        """Do in one tick what there is room for."""
        came = self.per_s * self._tick_s
        self.left += came
        if self._is_on:
            free = columns.ready * columns.capacity * (1 - MARGIN) - columns.rate
            done = np.minimum(np.maximum(free, 0.0) * self._tick_s, self.left)
            self.left -= done
            self.pace = done / self._tick_s
            # Of the lines that run at this pace on each replica, at the speed of a full one.
            full_s = columns.fixed_s + columns.slots * columns.shared_s
            self.beside = self.pace * full_s / np.maximum(columns.ready, 1.0)
            if self._is_demand:
                # While there is more to do than room, every slot that is free has a line.
                some = np.floor(columns.ready * columns.slots - columns.running)
                columns.batched = np.where(self.left > 0, np.maximum(some, 0.0), 0.0)
                columns.batched[(self.left > 0) & (columns.ready == 0)] = 1.0
        recorder.filled(came, self.pace)
