"""What a replica probably still holds of a prompt: hashes of its leading blocks.

Engines keep the attention state of past prompts by blocks and reuse the
longest leading run that a new prompt shares. We cannot see their caches, but
we know what we sent where, and how they forget (least recently used, ends of
prompts first). So each replica has an index of the blocks sent to it, fed by
our own dispatches and nothing else.

A block stands for itself and everything before it (its hash is chained), so
the blocks of an index always form whole leading runs: when a block is in, all
blocks before it are in. That is what makes a binary search right.
"""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Generic, TypeVar

R = TypeVar("R")

BLOCK_BYTES = 1024
"""About 256 tokens of English, 16 blocks of vLLM's usual size: fine enough to route by."""
BLOCKS_MAX = 512
"""Half a megabyte of prompt; what comes after is not looked at."""


def chain(text: bytes, *, salt: int, block_bytes: int = BLOCK_BYTES, blocks_max: int = BLOCKS_MAX) -> tuple[int, ...]:
    """Return the chained 64-bit hashes of the whole leading blocks of ``text``; none when it is shorter than one.

    ``salt`` stands for the tenant and enters the first link: equal prompts of two tenants have no hash in common, so
    that nobody can find out by timing what somebody else asks.

    The hash is the interpreter's own (SipHash with a random key per process): three times as fast as any of hashlib,
    and nobody outside can aim at a collision. The price: hashes mean nothing to another process or after a restart, so
    an index is never stored or sent. A collision (2^-64 a pair) costs a wrong guess of where a prompt is cached.
    """
    size = min(len(text) // block_bytes, blocks_max) * block_bytes
    link = salt
    links = []
    for start in range(0, size, block_bytes):
        link = hash((link, text[start : start + block_bytes]))
        links.append(link)
    return tuple(links)


class PrefixIndex:
    """The blocks that one replica probably holds, least recently used first.

    At most ``blocks_max``, which should be what its cache holds: its KV tokens divided by the tokens of a block. When
    it is full a sixteenth is forgotten at once, because looking for the oldest key of a dict costs a walk over the
    places of deleted ones. About 110 bytes a block.
    """

    __slots__ = ("_blocks", "blocks_max")

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<PrefixIndex: {len(self._blocks)}/{self.blocks_max} blocks>"

    def matched(self, prefix: Sequence[int]) -> int:
        """Return how many leading blocks of ``prefix`` are here. Nothing counts as used by asking."""
        blocks = self._blocks
        # Most prompts share nothing with most replicas, so this is the common answer.
        if not prefix or prefix[0] not in blocks:
            return 0
        low, high = 1, len(prefix)
        while low < high:
            middle = (low + high + 1) >> 1
            if prefix[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, prefix: Sequence[int]) -> int:
        """Note that a prompt goes to this replica; return how many of its leading blocks were here before."""
        if not prefix:
            return 0
        before = self.matched(prefix)
        blocks = self._blocks
        # From the end to the start, so that a block is always younger than those that follow it: then the oldest of
        # all is the end of a run, and forgetting it leaves whole runs.
        for link in reversed(prefix):
            blocks.pop(link, None)
            blocks[link] = None
        excess = len(blocks) - self.blocks_max
        if excess > 0:
            for link in list(islice(blocks, excess + (self.blocks_max >> 4))):
                del blocks[link]
        return before

    def clear(self) -> None:
        """Forget everything: the engine started anew."""
        self._blocks.clear()


class PrefixHolders(Generic[R]):
    """Who of many replicas was last sent a prefix; a guide for whom to ask, not an answer.

    Asking every index is fine for a handful of replicas. For hundreds this keeps the last few replicas of some blocks
    of each prompt: those at depths 1, 2, 4, 8, … and the last, at which the next turn of a conversation finds it. Old
    blocks are forgotten by halves: what was not noted again while as many others came goes.

    ``homes`` keeps which replica a session belongs to, because finding that out asks all of them; it is empty after
    every ``keep``, so that it never outlives a change of the fleet.
    """

    __slots__ = ("_members", "_new", "_old", "blocks_max", "holders_max", "homes")

    def __init__(self, blocks_max: int, *, holders_max: int = 8) -> None:
        self.blocks_max = blocks_max
        self.holders_max = holders_max
        self._new: dict[int, list[R]] = {}
        self._old: dict[int, list[R]] = {}
        self._members: frozenset[R] | None = None
        self.homes: dict[int, R] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, prefix: Sequence[int], replica: R) -> None:
        """Note that a prompt goes to ``replica``."""
        depth = 1
        while depth < len(prefix):
            self._note(prefix[depth - 1], replica)
            depth *= 2
        if prefix:
            self._note(prefix[-1], replica)
        if len(self._new) > self.blocks_max >> 1:
            self._old, self._new = self._new, {}

    def find(self, prefix: Sequence[int], *, at_most: int) -> list[R]:
        """Return replicas that were sent the most of ``prefix``, the best first."""
        found: list[R] = []
        new, old, members = self._new, self._old, self._members
        for link in reversed(prefix):
            if link in new or link in old:
                for replica in reversed(new.get(link) or old[link]):
                    if replica not in found and (members is None or replica in members):
                        found.append(replica)
                        if len(found) == at_most:
                            return found
        return found

    def keep(self, replicas: Collection[R]) -> None:
        """Find only these from now on; to be called whenever one comes, goes or drains.

        Costs no walk over the blocks: what the others had ages like everything.
        """
        self._members = frozenset(replicas)
        self.homes.clear()

    def settle(self, session: int, replica: R) -> None:
        """Note where a session belongs."""
        if len(self.homes) >= self.blocks_max:
            self.homes.clear()
        self.homes[session] = replica

    def _note(self, link: int, replica: R) -> None:
        holders = self._new.get(link)
        if holders is None:
            holders = self._new[link] = self._old.pop(link, [])
        if replica in holders:
            holders.remove(replica)
        elif len(holders) >= self.holders_max:
            del holders[0]
        holders.append(replica)
