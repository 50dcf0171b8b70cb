"""The KV cache of one engine: blocks that are held, kept for whoever begins alike, or free.

As vLLM has it: what a request leaves stays where it is until its blocks are
needed, least recently used first and each request's last blocks before its
first ones, so that a prompt with the same beginning need not be read again.
Blocks are not told apart one by one but kept by what can be found again: a
hash of a trace stands for ``hash_blocks`` blocks, the rest of a request for one
entry, from whose end blocks are taken one at a time.
"""

from collections import OrderedDict
from collections.abc import Sequence

Key = int
"""What an entry is found by: a hash of a prompt's part (0 or more), or a number below 0 of a request of its own."""


class KvCache:
    """``blocks`` in all. ``hash_blocks`` is how many one hash stands for; 0: prefixes are not kept."""

    __slots__ = ("_evictable", "_kept", "_names", "_shared", "blocks", "free", "hash_blocks")

    def __init__(self, blocks: int, hash_blocks: int) -> None:
        self.blocks = blocks
        self.hash_blocks = hash_blocks
        self.free = blocks
        """Blocks that hold nothing."""
        self._kept: OrderedDict[Key, int] = OrderedDict()
        """Blocks that nobody holds, by what is in them; least recently used first."""
        self._evictable = 0
        self._shared: dict[Key, int] = {}
        """How many hold a part of a prompt."""
        self._names = 0

    def __repr__(self) -> str:
        return f"<KvCache {self.held}/{self.blocks} blocks held, {self._evictable} kept>"

    @property
    def available(self) -> int:
        """Return the blocks that can be had: free ones, and those kept for nobody in particular."""
        return self.free + self._evictable

    @property
    def held(self) -> int:
        """Return the blocks that running requests hold."""
        return self.blocks - self.free - self._evictable

    def matched(self, hashes: Sequence[int]) -> int:
        """Return how many leading parts of a prompt are there."""
        if not self.hash_blocks:
            return 0
        shared, kept = self._shared, self._kept
        count = 0
        for key in hashes:
            if key not in shared and key not in kept:
                break
            count += 1
        return count

    def idle_in(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of these parts are held by nobody: to share them takes them off what is available."""
        kept = self._kept
        return sum(self.hash_blocks for key in hashes if key in kept)

    def share(self, hashes: Sequence[int]) -> None:
        """Hold parts that are there."""
        shared, kept = self._shared, self._kept
        for key in hashes:
            if key in shared:
                shared[key] += 1
            else:
                self._evictable -= kept.pop(key)
                shared[key] = 1

    def take(self, blocks: int) -> None:
        """Hold ``blocks`` more, which must be available."""
        while (short := blocks - self.free) > 0:
            self._evict(short)
        self.free -= blocks

    def adopt(self, key: int) -> bool:
        """Let others find a part whose blocks the caller took; say whether it was news, and is to be left by its hash.

        Of two that read the same part at the same time only one's is found.
        """
        if key in self._shared or key in self._kept:
            return False
        self._shared[key] = 1
        return True

    def leave(self, hashes: Sequence[int], blocks: int) -> Key:
        """Let go of shared parts and of ``blocks`` besides; return under which key the latter are kept for a while."""
        self._names = name = self._names - 1
        kept, shared = self._kept, self._shared
        if blocks:
            kept[name] = blocks
            self._evictable += blocks
        # The last part first: whoever comes next needs the beginning more.
        for key in reversed(hashes):
            left = shared[key] - 1
            if left:
                shared[key] = left
            else:
                del shared[key]
                kept[key] = self.hash_blocks
                self._evictable += self.hash_blocks
        return name

    def left_of(self, key: Key) -> int:
        """Return how many of the blocks that were left under ``key`` are still there."""
        return self._kept.get(key, 0)

    def take_back(self, key: Key) -> int:
        """Hold again what is still there of the blocks left under ``key``; return how many that is."""
        blocks = self._kept.pop(key, 0)
        self._evictable -= blocks
        return blocks

    def _evict(self, wanted: int) -> None:
        key, blocks = next(iter(self._kept.items()))
        if key < 0 and blocks > wanted:
            self._kept[key] = blocks - wanted
            self._evictable -= wanted
            self.free += wanted
            return
        # Less than a whole part of a prompt is of no use to anybody.
        del self._kept[key]
        self._evictable -= blocks
        self.free += blocks
