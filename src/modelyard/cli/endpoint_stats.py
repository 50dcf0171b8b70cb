"""``modelyard endpoints stats``: what happened to an endpoint in the last seconds."""

import click

from modelyard.cli.http import Platform, connected, segment
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, formats, show_json, show_pairs, show_table

_HEADINGS = ["RELEASE", "REQUESTS", "ERRORS", "TTFT p50", "p95", "p99", "ITL p95", "LATENCY p99", "TOKENS/S"]


@click.command(
    "stats",
    epilog="\b\nExample:\n  modelyard endpoints stats demo\n  modelyard endpoints stats demo --window 5m --json",
    short_help="Show rates, errors and latencies of an endpoint and its releases.",
)
@click.argument("name")
@click.option("--window", type=DURATION, default="60s", show_default=True, help="How far back: 10s to 20m.")
@connected
@formats("Print only the requests in the window.")
def stats(name: str, *, platform: Platform, window: float, is_json: bool, is_quiet: bool) -> None:
    """Show what happened to the endpoint NAME and its releases in the last seconds."""
    found: Item = platform.get(f"/v1/endpoints/{segment(name)}/stats", window=window)
    if is_json:
        show_json(found)
        return
    if is_quiet:
        print(found["stats"]["requests"])
        return
    rates = ", ".join(f"{rate:.3g} in {span} s" for span, rate in sorted(found["arrivals_per_s"].items(), key=_span))
    show_pairs(
        {
            "Endpoint": found["name"],
            "Window": f"{found['stats']['window_s']:.0f} s",
            "Arrivals/s": rates,
            "Waiting": f"{found['queued']} now, {found['queued_max']} at most",
            "Wait": f"{found['predicted_wait_s']:.3g} s predicted",
        }
    )
    print()
    rows = [_row(f"{one['version']} ({one['weight']} %)", one["stats"]) for one in found["releases"]]
    show_table(_HEADINGS, [*rows, _row("all", found["stats"])])


def _span(item: tuple[str, float]) -> int:
    return int(item[0])


def _row(name: str, stats: Item) -> list[object]:
    names = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "itl_p95_s", "latency_p99_s")
    errors = f"{stats['errors']} ({stats['error_share']:.1%})"
    return [
        name, stats["requests"], errors, *(_ms(stats[one]) for one in names), f"{stats['completion_tokens_per_s']:.1f}",
    ]  # fmt: skip


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
