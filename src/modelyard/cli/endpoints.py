"""``modelyard endpoints``: what is deployed, how far it is and why it is not further."""

from collections.abc import Callable

import click

from modelyard.cli.exits import Exit, Refused
from modelyard.cli.http import PAGE, Platform, close_names, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import (
    Item,
    age,
    listing,
    moment,
    owners,
    remark,
    show_json,
    show_list,
    show_pairs,
    show_table,
    stage_text,
)


@click.group(
    "endpoints",
    cls=NounGroup,
    epilog="\b\nExample:\n  modelyard endpoints\n  modelyard endpoints demo\n  modelyard endpoints rm demo",
    short_help="List, show or remove endpoints.",
)
def command() -> None:
    """List all endpoints, show the one called NAME ('endpoints NAME'), or remove it ('endpoints rm NAME')."""


@command.command("list", epilog="\b\nExample:\n  modelyard endpoints list --json")
@connected
@listing
def list_endpoints(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List all endpoints that you may see."""
    columns: dict[str, Callable[[Item], object]] = {
        "NAME": lambda endpoint: endpoint["name"],
        "STATUS": lambda endpoint: endpoint["status"],
        "REPLICAS": lambda endpoint: f"{endpoint['current_replicas']}/{endpoint['max_replicas']}",
        "STAGE": lambda endpoint: endpoint.get("failure") or stage_text(endpoint),
        "AGE": lambda endpoint: age(endpoint["created_at"]),
        "ID": lambda endpoint: endpoint["id"],
    }
    endpoints = platform.all("/v1/endpoints", limit=PAGE)
    columns |= owners(endpoints, "owner_id")
    empty = "No endpoints. Deploy a model: modelyard deploy ./model.gguf --name demo --wait"
    show_list(endpoints, columns, is_json=is_json, is_quiet=is_quiet, empty=empty)


@command.command("show", epilog="\b\nExample:\n  modelyard endpoints demo")
@click.argument("name")
@connected
@listing
def show(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show one endpoint: its stage, its replicas and what happened to it."""
    path = f"/v1/endpoints/{segment(name)}"
    endpoint: Item = _find(platform, name, platform.get, path)
    if is_quiet:
        print(endpoint["id"])
        return
    if is_json:
        show_json(endpoint)
        return
    show_pairs(
        {
            "Name": endpoint["name"],
            "ID": endpoint["id"],
            "Status": endpoint["status"],
            "Stage": stage_text(endpoint),
            "Failure": endpoint.get("failure"),
            "Model": f"{endpoint['model_version']} on {endpoint['framework']}",
            "Scale": _scale(endpoint),
            "Load": f"{endpoint['in_flight']} running, {endpoint['queued']} waiting",
            "Created": moment(endpoint["created_at"]),
        }
    )
    if replicas := endpoint.get("replicas"):
        print()
        rows = [(one["id"], one["state"], f"{one['age_s']}s", one["reason"]) for one in replicas]
        show_table(["REPLICA", "STATE", "AGE", "REASON"], rows)
    if events := endpoint.get("events"):
        print()
        rows = [(moment(one["at"]), one["kind"], one["reason"], one.get("replica_id")) for one in events]
        show_table(["WHEN", "EVENT", "REASON", "REPLICA"], rows)


@command.command(
    "rm",
    epilog="\b\nExample:\n  modelyard endpoints rm demo",
    short_help="Remove an endpoint; running requests are finished.",
)
@click.argument("name")
@connected
def remove(name: str, *, platform: Platform) -> None:
    """Remove an endpoint; running requests are finished, and its usage stays in the ledger."""
    _find(platform, name, platform.delete, f"/v1/endpoints/{segment(name)}")
    remark(f"Removed '{name}'; its replicas finish what they are doing and stop.")


def _find(platform: Platform, name: str, ask: Callable[[str], Item], path: str) -> Item:
    try:
        return ask(path)
    except Refused as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        names = [endpoint["name"] for endpoint in platform.all("/v1/endpoints", limit=PAGE)]
        raise error.with_hint(close_names(name, names)) from error


def _scale(endpoint: Item) -> str:
    least = 0 if endpoint["scale_to_zero"] else endpoint["min_replicas"]
    text = f"{least}..{endpoint['max_replicas']}"
    if endpoint["scale_to_zero"]:
        text += f", to 0 after {endpoint['scale_to_zero_after_idle_seconds']:g} s without a request"
    return text
