"""What attention keeps of the tokens it has seen: the KV cache in bytes, from a model's own shape.

``DESIGN.md`` section 12: it is the *KV* heads that count. Taking the attention heads instead is 8 times off for
Llama-70B, which needs 320 KiB a token and not 2.5 MiB.
"""

from fractions import Fraction

import msgspec

from modelyard.domain.facts import ModelFacts

CACHE_BYTES = 2
"""Bytes of a number in a KV cache of 16 bits, which facts are in."""


class Attention(msgspec.Struct, frozen=True):
    """The shape of a model's attention. ``kv_heads`` has one entry a layer, 0 for a layer that keeps no keys.

    ``latent_size`` is of multi-head latent attention, whose layers keep one vector of so many numbers a token
    (``kv_lora_rank + qk_rope_head_dim``) instead of keys and values. ``windowed`` says of each layer whether it keeps
    ``window`` tokens at most; without entries none does.
    """

    kv_heads: tuple[int, ...]
    key_size: int
    value_size: int
    latent_size: int = 0
    window: int = 0
    windowed: tuple[bool, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers."""
        return sum(map(self._layer_bytes, self.kv_heads))

    @property
    def window_bytes_per_token(self) -> int:
        """The part of them that is in layers with a sliding window."""
        if not self.window:
            return 0
        return sum(
            self._layer_bytes(heads)
            for heads, is_windowed in zip(self.kv_heads, self.windowed, strict=False)
            if is_windowed
        )

    def on(self, facts: ModelFacts) -> ModelFacts:
        """Return ``facts`` with what a token takes; a window that no layer keeps keys in is none."""
        window_bytes = self.window_bytes_per_token
        return msgspec.structs.replace(
            facts,
            kv_bytes_per_token=self.bytes_per_token,
            kv_is_latent=bool(self.latent_size),
            sliding_window=self.window if window_bytes else 0,
            kv_window_bytes_per_token=window_bytes,
        )

    def _layer_bytes(self, kv_heads: int) -> int:
        if not kv_heads:
            return 0
        return (self.latent_size or kv_heads * (self.key_size + self.value_size)) * CACHE_BYTES


def kv_bytes(facts: ModelFacts, tokens: int, *, precision: Fraction = Fraction(1), spare: int = 0) -> int:
    """Return the bytes of cache of one sequence of ``tokens``.

    ``precision`` is a number's share of 16 bits; ``spare`` tokens are kept beyond each window, as engines do that
    write a batch before they forget. Recurrent state is not made smaller by ``precision``.
    """
    full = facts.kv_bytes_per_token - facts.kv_window_bytes_per_token
    in_window = min(tokens, facts.sliding_window + spare) if facts.sliding_window else tokens
    numbers = full * tokens + facts.kv_window_bytes_per_token * in_window
    return -int(-numbers * precision // 1) + facts.state_bytes
