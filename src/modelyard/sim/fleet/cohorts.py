"""Clients in disjoint groups, so that settings are judged on endpoints whose like nobody has seen."""

import random
from collections.abc import Sequence

import msgspec

from modelyard.sim.rates import Client

_BLOCK = 4


class Cohorts(msgspec.Struct, frozen=True):
    """Half of the clients to learn on, a quarter to choose by, a quarter to judge by."""

    training: tuple[Client, ...]
    validation: tuple[Client, ...]
    held_out: tuple[Client, ...]


def split(clients: Sequence[Client], chance: random.Random) -> Cohorts:
    """Return ``clients`` in disjoint groups that are alike in how much they ask for.

    By rank of their rates, in blocks of four: by chance two of each go to training, one each to the others.
    """
    ranked = sorted(clients, key=lambda one: (-one.mean_rate, one.name))
    groups: tuple[list[Client], ...] = ([], [], [])
    for at in range(0, len(ranked), _BLOCK):
        where = [0, 0, 1, 2]
        chance.shuffle(where)
        for one, group in zip(ranked[at : at + _BLOCK], where, strict=False):
            groups[group].append(one)
    return Cohorts(*map(tuple, groups))
