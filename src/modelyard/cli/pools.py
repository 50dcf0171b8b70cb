"""``modelyard pools``: replicas of popular bases that wait for whoever needs one."""

from collections.abc import Callable

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, listing, remark, show_json, show_list


@click.group(
    "pools",
    cls=NounGroup,
    epilog="\b\nExample:\n  modelyard pools\n  modelyard pools set fast --of smol --replicas 2",
    short_help="List, set and remove warm pools of loaded models.",
)
def command() -> None:
    """List, set and remove warm pools: a cold endpoint of the same model takes one of their replicas at once."""


@command.command(
    "list",
    epilog="\b\nExample:\n  modelyard pools\n  modelyard pools --json",
    short_help="List warm pools.",
)
@connected
@listing
def show(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List warm pools, what waits in them, and why they have their size."""
    columns: dict[str, Callable[[Item], object]] = {
        "POOL": lambda pool: pool["name"],
        "MODEL": lambda pool: f"{pool['model']}@{pool['version']}",
        "READY": lambda pool: f"{pool['ready']}/{pool['wanted']}",
        "LOADING": lambda pool: pool["loading"],
        "NODES": lambda pool: pool["node_pool"],
        "WHY": lambda pool: pool["reason"],
    }
    empty = "No warm pools. Make one: modelyard pools set NAME --of MODEL --replicas 1"
    show_list(platform.all("/v1/pools", limit=PAGE), columns, is_json=is_json, is_quiet=is_quiet, empty=empty)


@command.command(
    "set",
    epilog="\b\nExample:\n  modelyard pools set fast --of smol --replicas 2\n  modelyard pools set auto --of smol@v3",
    short_help="Make or change a warm pool.",
)
@click.argument("name")
@click.option("--of", "model", required=True, help="The model: NAME, NAME@VERSION or a version's id.")
@click.option(
    "--replicas", type=click.IntRange(1, 64), help="Replicas that wait. [default: as many as cold starts ask for]"
)
@click.option("--node-pool", default="default", show_default=True, help="Nodes that they run on.")
@connected
@listing
def put(
    name: str, model: str, replicas: int | None, node_pool: str, *, platform: Platform, is_json: bool, is_quiet: bool
) -> None:
    """Make the warm pool NAME, or change it."""
    body = {"model": model, "replicas": replicas, "node_pool": node_pool}
    pool = platform.put_json(f"/v1/pools/{segment(name)}", body)
    if is_json:
        show_json(pool)
    elif is_quiet:
        print(pool["name"])
    else:
        number = "a learned number of replicas" if replicas is None else f"{replicas} replica{'s' * (replicas > 1)}"
        print(f"Pool '{name}' keeps {number} of {pool['model']}@{pool['version']}. See: modelyard pools")


@command.command(
    "rm", epilog="\b\nExample:\n  modelyard pools rm fast", short_help="Remove a warm pool; what was taken goes on."
)
@click.argument("name")
@connected
def remove(name: str, *, platform: Platform) -> None:
    """Remove the warm pool NAME; replicas that endpoints took stay theirs."""
    platform.delete(f"/v1/pools/{segment(name)}")
    remark(f"Removed pool '{name}'; what waits in it stops.")
