"""Clients are judged on that nobody learned from."""

import random

from modelyard.sim.fleet.cohorts import split
from modelyard.sim.rates import Client

CLIENTS = [Client(f"language/{at}", (float(at),), (1.0,)) for at in range(314)]


def test_groups_share_nobody_and_leave_nobody_out() -> None:
    groups = split(CLIENTS, random.Random(1))
    sizes = [len(group) for group in (groups.training, groups.validation, groups.held_out)]
    assert (sum(sizes), min(sizes)) == (314, 78)
    names = {one.name for group in (groups.training, groups.validation, groups.held_out) for one in group}
    assert len(names) == 314
    assert split(CLIENTS[::-1], random.Random(1)) == groups, "whatever the order"


def test_no_group_has_all_who_ask_for_much() -> None:
    groups = split(CLIENTS, random.Random(2))
    for group in (groups.training, groups.validation, groups.held_out):
        mean = sum(one.mean_rate for one in group) / len(group)
        assert abs(mean - 156.5) < 3
