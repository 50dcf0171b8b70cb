"""What a KV cache takes: known models to the byte, and what must hold for any shape."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.domain.attention import Attention, kv_bytes
from modelyard.domain.facts import ModelFacts

MIB = 1024 * 1024


def plain(layers: int, kv_heads: int, head_size: int) -> Attention:
    return Attention((kv_heads,) * layers, head_size, head_size)


def facts(attention: Attention, state_bytes: int = 0) -> ModelFacts:
    return ModelFacts(
        kv_bytes_per_token=attention.bytes_per_token,
        kv_window_bytes_per_token=attention.window_bytes_per_token,
        sliding_window=attention.window,
        state_bytes=state_bytes,
    )


def test_known_models_to_the_byte() -> None:
    llama_70b = plain(80, 8, 128)
    assert llama_70b.bytes_per_token == 320 * 1024
    assert kv_bytes(facts(llama_70b), 4096) == 1.25 * 2**30
    assert plain(80, 64, 128).bytes_per_token == 8 * llama_70b.bytes_per_token, (
        "what counting all attention heads gives"
    )
    assert plain(32, 8, 128).bytes_per_token == 128 * 1024  # Llama-3.1-8B
    assert plain(30, 3, 64).bytes_per_token == 23_040  # SmolLM2-135M
    assert Attention((128,) * 61, 192, 128, latent_size=512 + 64).bytes_per_token == 70_272  # DeepSeek-V3
    assert Attention((0, 0, 0, 2) * 12, 256, 256).bytes_per_token == 24_576  # Qwen3-Next-80B: a quarter of the layers


def test_a_window_is_kept_and_no_more() -> None:
    mistral_7b = Attention((8,) * 32, 128, 128, window=4096, windowed=(True,) * 32)
    assert kv_bytes(facts(mistral_7b), 100) == 100 * 128 * 1024
    assert kv_bytes(facts(mistral_7b), 32_768) == kv_bytes(facts(mistral_7b), 4096) == 512 * MIB
    assert kv_bytes(facts(mistral_7b), 32_768, spare=512) == (4096 + 512) * 128 * 1024
    # Gemma-3-4B: 34 layers, every sixth looks at all tokens.
    gemma = Attention((4,) * 34, 256, 256, window=1024, windowed=tuple(layer % 6 != 5 for layer in range(34)))
    assert gemma.bytes_per_token == 34 * 4096
    assert kv_bytes(facts(gemma), 8192) == 5 * 4096 * 8192 + 29 * 4096 * 1024


def test_precision_is_of_the_cache_and_not_of_the_state() -> None:
    llama = facts(plain(2, 2, 16), state_bytes=1000)
    assert kv_bytes(llama, 10) == 2560 + 1000
    assert kv_bytes(llama, 10, precision=Fraction(34, 64)) == 1360 + 1000
    assert kv_bytes(llama, 10, precision=Fraction(18, 64)) == 720 + 1000
    assert kv_bytes(facts(plain(1, 1, 1)), 1, precision=Fraction(1, 3)) == 2, "never less than it takes"


shapes = st.builds(
    lambda layers, window: Attention(
        tuple(heads for heads, _ in layers), 64, 32, window=window, windowed=tuple(flag for _, flag in layers)
    ),
    st.lists(st.tuples(st.integers(0, 64), st.booleans()), max_size=100),
    st.integers(0, 10_000),
)


@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(1, 200),
    groups=st.integers(1, 16),
    kv_heads=st.integers(1, 64),
    size=st.sampled_from([64, 80, 128]),
)
def test_grouped_queries_take_their_share_of_what_all_heads_would(
    layers: int, groups: int, kv_heads: int, size: int
) -> None:
    grouped, every = plain(layers, kv_heads, size), plain(layers, kv_heads * groups, size)
    assert grouped.bytes_per_token == 2 * layers * kv_heads * size * 2
    assert every.bytes_per_token == groups * grouped.bytes_per_token


@settings(max_examples=100, deadline=None)
@given(attention=shapes, tokens=st.integers(0, 100_000), more=st.integers(0, 100_000))
def test_a_cache_grows_with_its_sequence_and_a_window_never_makes_it_larger(
    attention: Attention, tokens: int, more: int
) -> None:
    cache = facts(attention)
    assert attention.window_bytes_per_token <= attention.bytes_per_token
    assert kv_bytes(cache, tokens) <= kv_bytes(cache, tokens + more)
    assert kv_bytes(cache, tokens) <= tokens * attention.bytes_per_token
    assert kv_bytes(cache, tokens, precision=Fraction(18, 64)) <= kv_bytes(cache, tokens)
    if tokens <= attention.window:
        assert kv_bytes(cache, tokens) == tokens * attention.bytes_per_token
