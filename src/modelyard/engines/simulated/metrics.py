"""The metrics page, with vLLM's names, so that one dashboard and one parser fit both."""

from modelyard.engines.simulated.batching import Batch, PrefixCache
from modelyard.engines.simulated.generation import Totals
from modelyard.engines.simulated.tokens import BLOCK_TOKENS


def metrics_page(model: str, batch: Batch, totals: Totals, cache: PrefixCache, *, is_asleep: bool | None = None) -> str:
    """Return the page in Prometheus's text format; ``is_asleep`` None: it cannot sleep, and says nothing of it."""
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'engine="0",model_name="{name}"'
    lines: list[str] = []

    def add(metric: str, kind: str, value: float, more: str = "") -> None:
        if f"# TYPE vllm:{metric} {kind}" not in lines:
            lines.append(f"# TYPE vllm:{metric} {kind}")
        lines.append(f"vllm:{metric}{{{labels}{more}}} {value:.10g}")

    add("num_requests_running", "gauge", batch.running)
    add("num_requests_waiting", "gauge", batch.waiting)
    add("kv_cache_usage_perc", "gauge", batch.kv_usage)
    add("prefix_cache_queries_total", "counter", cache.queries)
    add("prefix_cache_hits_total", "counter", cache.hits)
    add("prompt_tokens_total", "counter", totals.prompt_tokens)
    add("prompt_tokens_cached_total", "counter", totals.cached_tokens)
    add("generation_tokens_total", "counter", totals.generation_tokens)
    add("num_preemptions_total", "counter", batch.preemptions)
    for reason in ("stop", "length", "abort", "error"):
        add("request_success_total", "counter", totals.finished.get(reason, 0), f',finished_reason="{reason}"')
    if is_asleep is not None:
        add("engine_sleep_state", "gauge", not is_asleep, ',sleep_state="awake"')
        add("engine_sleep_state", "gauge", is_asleep, ',sleep_state="weights_offloaded"')
    add("cache_config_info", "gauge", 1, f',block_size="{BLOCK_TOKENS}",num_gpu_blocks="{batch.blocks}"')
    return "\n".join(lines) + "\n"
