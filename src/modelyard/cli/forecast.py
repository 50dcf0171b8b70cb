"""``modelyard forecast``: when requests are expected, whether that was right, and what it would have saved."""

from pathlib import Path
from typing import Any

import click

from modelyard.cli.http import Platform, connected, data_dir_option, find_platform, segment
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, formats, moment, remark, show_json, show_pairs, show_table

SLOT_S = 600
"""Width of the ledger's counts, as in ``policy/forecast.py``, which is slow to import."""


@click.group(
    "forecast",
    epilog="\b\nExample:\n  modelyard forecast show demo\n  modelyard forecast backtest demo --days 28\n"
    "  modelyard forecast backtest --trace arrivals.csv",
    short_help="Show when requests are expected, and replay.",
)
def command() -> None:
    """Show what is expected of an endpoint, or replay requests with and without the forecast."""


@command.command("show", epilog="\b\nExample:\n  modelyard forecast show demo --hours 12")
@click.argument("name")
@click.option("--hours", type=click.IntRange(1, 168), default=24, show_default=True, help="How far ahead.")
@connected
@formats("Print only the times at which it is started.")
def show(name: str, *, platform: Platform, hours: int, is_json: bool, is_quiet: bool) -> None:
    """Show when requests of the endpoint NAME are expected, and how often that was right."""
    found: Item = platform.get(f"/v1/endpoints/{segment(name)}/forecast", hours=hours)
    if is_json:
        show_json(found)
        return
    warm = [slot for slot in found["slots"] if slot["is_prewarmed"]]
    if is_quiet:
        for slot in warm:
            print(moment(slot["at"]))
        return
    show_pairs(
        {
            "Name": found["name"],
            "Learned": f"{found['weeks_learned']:g} weeks",
            "Foreseen": f"{_share(found['hit_rate'])} of {found['hits'] + found['misses']} awakenings",
            "Met": f"{_share(found['precision'])} of {found['hits'] + found['wasted']} waits",
            "Budget": f"{found['spent_today_gpu_hours']:g} of {found['budget_gpu_hours']:g} GPU-hours today",
            "Starts when": f"requests are expected with {found['threshold']:.0%} or more"
            if found["prewarm"]
            else "never: pre-warming is off",
        }
    )
    print()
    rows = [(moment(slot["at"]), f"{slot['probability']:.0%}", f"{slot['requests_per_second']:.3f}") for slot in warm]
    if rows:
        show_table(["EXPECTED", "CHANCE", "REQUESTS/S"], rows)
    else:
        remark(f"Nothing that is worth a start is expected in the next {hours} h.")


@command.command(
    "backtest",
    epilog="\b\nExample:\n  modelyard forecast backtest demo --days 28\n"
    "  modelyard forecast backtest --trace arrivals.csv --load 90s",
    short_help="Replay requests with and without the forecast.",
)
@click.argument("name", required=False)
@click.option("--days", type=click.IntRange(1, 366), default=28, show_default=True, help="Days of its own history.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay this file instead: a time a line, JSON lines or CSV with 'timestamp'.",
)
@click.option("--load", "load_s", type=DURATION, default="60s", show_default=True, help="Time of a load; --trace only.")
@click.option("--idle", "idle_s", type=DURATION, default="5m", show_default=True, help="Idle time; --trace only.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--url", metavar="URL", help="The platform's address [env: MODELYARD_URL].")
@click.option("--key", metavar="KEY", help="API key [env: MODELYARD_API_KEY].")
@data_dir_option
def backtest(name: str | None, *, trace: Path | None, is_json: bool, **given: Any) -> None:
    """Replay the requests of the endpoint NAME, or those of a file, with and without the forecast.

    Of an endpoint the ledger's requests are counted by ten minutes and taken as spread evenly within them: with a
    shorter idle time its cold starts are an estimate. Those of a file are replayed at their exact times.
    """
    result: Item | None
    if trace is not None:
        result, idle_s = _replayed(trace, given["load_s"], given["idle_s"]), None
    elif name is None:
        raise click.UsageError("Give the NAME of an endpoint, or a file with --trace")
    else:
        platform = find_platform(url=given["url"], key=given["key"], data_dir=given["data_dir"])
        found: Item = platform.get(f"/v1/endpoints/{segment(name)}/forecast/backtest", days=given["days"])
        result, idle_s = found["result"], found["idle_s"]
    if is_json:
        show_json(result)
    elif result is None:
        remark(f"'{name}' had no requests in the last {given['days']} days.")
    else:
        _show_backtest(result)
        if idle_s is not None and idle_s < SLOT_S:
            remark(
                f"An estimate: requests are counted by ten minutes and taken as spread evenly within them, which says"
                f" little about sleep after {idle_s:g} s. A file with --trace is replayed at its exact times."
            )


def _replayed(trace: Path, load_s: float, idle_s: float) -> Item:
    import msgspec

    from modelyard.cli.exits import Exit, Failure
    from modelyard.cli.traces import read_arrivals
    from modelyard.domain.endpoints import Autoscale
    from modelyard.policy.backtest import backtest as replay
    from modelyard.policy.backtest import by_slot

    try:
        result = replay(by_slot(read_arrivals(trace)), Autoscale(), idle_s=idle_s, load_s=load_s)
    except ValueError as error:
        raise Failure(f"{trace} cannot be replayed: {error}.", Exit.USAGE) from error
    built: Item = msgspec.to_builtins(result)
    return built


def _show_backtest(result: Item) -> None:
    lines = [
        (label, result[name]["cold_starts"], f"{result[name]['gpu_hours']:.2f}")
        for label, name in (("by idle time alone", "fixed"), ("with the forecast", "forecast"))
    ]
    show_table(["ASLEEP", "COLD STARTS", "GPU-HOURS"], lines)
    learned = f", after {result['learned_days']:.0f} to learn from" if result["learned_days"] else ""
    remark(
        f"{result['requests']} requests in {result['days']:.1f} days{learned}. Cold starts foreseen:"
        f" {_share(result['hit_rate'])}. Of ten-minute slots: precision {_share(result['precision'])},"
        f" recall {_share(result['recall'])}."
    )


def _share(share: float | None) -> str:
    return "none yet" if share is None else f"{share:.0%}"
