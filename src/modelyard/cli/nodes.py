"""``modelyard nodes``: where replicas run, what is on each accelerator and what is free."""

from collections.abc import Callable

import click

from modelyard.cli.http import PAGE, Platform, connected
from modelyard.cli.output import Item, dollars, listing, show_list

GIB = 1024**3


@click.command(
    "nodes",
    epilog="\b\nExample:\n  modelyard nodes\n  modelyard nodes --json",
    short_help="List nodes, what runs on their accelerators, and what is free.",
)
@connected
@listing
def command(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List nodes, what runs on their accelerators, and what is free. Sizes are GiB; the price is of the whole node."""
    columns: dict[str, Callable[[Item], object]] = {
        "NODE": lambda node: node["id"],
        "POOL": lambda node: node["pool"] + (" (spot)" if node["is_spot"] else ""),
        "ACCELERATORS": _accelerators,
        "USED": lambda node: _gib(sum(one["memory_bytes"] - one["free_bytes"] for one in node["accelerators"])),
        "FREE": lambda node: _gib(sum(one["free_bytes"] for one in node["accelerators"])),
        "BY": _replicas,
        "CACHED": lambda node: _gib(node["cache_used_bytes"]),
        "PRICE/H": lambda node: dollars(node["nanousd_per_hour"]),
        "STATE": _state,
    }
    nodes = platform.all("/v1/nodes", limit=PAGE)
    show_list(nodes, columns, is_json=is_json, is_quiet=is_quiet, empty="No nodes.")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"


def _accelerators(node: Item) -> str:
    alike: dict[tuple[str, int], int] = {}
    for one in node["accelerators"]:
        key = (one["kind"], one["memory_bytes"])
        alike[key] = alike.get(key, 0) + 1
    return ", ".join(f"{count} x {kind} {_gib(size)}" for (kind, size), count in alike.items())


def _replicas(node: Item) -> str:
    """Return the endpoints on a node with what they take of it, the largest first."""
    taken: dict[str, int] = {}
    for accelerator in node["accelerators"]:
        for replica in accelerator["replicas"]:
            taken[replica["endpoint"]] = taken.get(replica["endpoint"], 0) + replica["memory_bytes"]
    ordered = sorted(taken.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{name} {_gib(size)}" for name, size in ordered[:3])
    return f"{shown}, {len(ordered) - 3} more" if len(ordered) > 3 else shown


def _state(node: Item) -> str:
    state = f"{node['state']} ({node['reason']})" if node["reason"] else node["state"]
    return f"{state}, simulated" if node["is_simulated"] else str(state)
