"""``modelyard status``: is everything in order, on one page. Exits 6 when it is not."""

from typing import Any

import click

from modelyard.cli.exits import Exit
from modelyard.cli.http import Platform, connected
from modelyard.cli.output import Item, clean, show_json, show_pairs


@click.command(
    "status",
    epilog="\b\nExample:\n  modelyard status\n  modelyard status --json",
    short_help="Show whether the platform is well.",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@click.option("--quiet", "-q", "is_quiet", is_flag=True, help="Print nothing; the exit code tells.")
@connected
@click.pass_context
def command(ctx: click.Context, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show whether the platform is well: planes, database, ledger, endpoints. Exits 6 when it is not."""
    status: Item = platform.get("/v1/status")
    problems = _problems(status)
    if is_json:
        show_json(status)
    elif not is_quiet:
        _show(platform, status, problems)
    ctx.exit(Exit.UNAVAILABLE if problems else Exit.OK)


def _show(platform: Platform, status: Item, problems: list[str]) -> None:
    journal = status["journal"]
    waiting = "unknown" if status["endpoints"] is None else "shown to admins"
    if journal is not None:
        waiting = f"{journal['open_requests']} open requests, {journal['backlog_bytes']} bytes to be booked"
    gateways = [f"{one['id']} ({one['in_flight']} running, {one['queued']} waiting)" for one in status["gateways"]]
    show_pairs(
        {
            "Modelyard": f"{status['version']} at {platform.url}, up {status['uptime_s']} s",
            "State": "; ".join(problems) or "well",
            "Gateways": ", ".join(gateways),
            "Endpoints": _counts(status["endpoints"]),
            "Replicas": _counts(status["replicas"]) + _moving(status.get("moving")),
            "Database": "well" if status["database"]["is_healthy"] else status["database"]["reason"],
            "Ledger": waiting,
            **{sink["sink"].capitalize(): _sink(sink) for sink in status.get("sinks") or ()},
        }
    )


def _problems(status: Item) -> list[str]:
    found = []
    if not status["database"]["is_healthy"]:
        found.append("the database does not answer")
    if not status["gateways"]:
        found.append("no gateway is connected")
    if failed := (status["endpoints"] or {}).get("failed"):
        found.append(f"{failed} endpoint{'s' if failed > 1 else ''} cannot start")
    found += [f"{sink['sink'].capitalize()} needs somebody" for sink in status.get("sinks") or () if sink["alarm"]]
    return found


def _sink(sink: Item) -> str:
    if sink["alarm"]:
        return clean(sink["alarm"])
    waiting = sink["pending"] or sink["waiting_bytes"]
    unit = "events" if sink["pending"] else "bytes"
    return f"{sink['sent']} events sent, {waiting} {unit} to go" if waiting else f"{sink['sent']} events sent"


def _moving(number: int | None) -> str:
    return f"; {number} move{'s' if number == 1 else ''} to other accelerators" if number else ""


def _counts(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return "unknown"
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"
