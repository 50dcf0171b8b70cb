"""``modelyard endpoints``: what is deployed, how far it is and why it is not further."""

from collections.abc import Callable
from typing import Any

import click

from modelyard.cli.autoscale import autoscale_options, size_text, tier_text
from modelyard.cli.deploy import Scale, local_file, version_body
from modelyard.cli.endpoint_stats import stats
from modelyard.cli.engine_choice import one_of
from modelyard.cli.exits import Refused
from modelyard.cli.http import PAGE, Platform, ask_of, connected, segment
from modelyard.cli.nouns import DURATION, NounGroup
from modelyard.cli.output import (
    Item,
    age,
    formats,
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
from modelyard.cli.rollouts import rollout_text
from modelyard.cli.sending import send_order
from modelyard.cli.serving import Share, release_text, serving_options, serving_text


@click.group(
    "endpoints",
    cls=NounGroup,
    epilog="\b\nExample:\n  modelyard endpoints\n  modelyard endpoints demo\n"
    "  modelyard endpoints set demo --sticky user\n"
    "  modelyard endpoints rm demo",
    short_help="List, show, change or remove endpoints.",
)
def command() -> None:
    """List all endpoints, show the one called NAME ('endpoints NAME'), change or remove it."""


command.add_command(stats)


@command.command("list", epilog="\b\nExample:\n  modelyard endpoints list --json")
@connected
@listing
def list_endpoints(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List all endpoints that you may see."""
    columns: dict[str, Callable[[Item], object]] = {
        "NAME": lambda endpoint: endpoint["name"],
        "STATUS": lambda endpoint: endpoint["status"],
        "REPLICAS": lambda endpoint: (
            f"on {endpoint['host'] or '?'}"
            if endpoint.get("host_id")
            else f"{endpoint['current_replicas']}/{endpoint['max_replicas']}"
        ),
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
    endpoint: Item = ask_of(platform, name, platform.get, path)
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
            "Host": endpoint.get("host") or (endpoint.get("host_id") and "gone"),
            "Scale": "" if endpoint.get("host_id") else _scale(endpoint),
            "Guests": _guests(endpoint),
            "Tier": tier_text(endpoint),
            "Size": size_text(endpoint),
            "Rollout": rollout_text(rollout) if (rollout := endpoint.get("rollout")) else "",
            "Served": serving_text(endpoint["serving"]),
            "Load": f"{max(0, endpoint['in_flight'] - endpoint['queued'])} running, {endpoint['queued']} waiting",
            "Created": moment(endpoint["created_at"]),
        }
    )
    if len(releases := endpoint["releases"]) > 1:
        print()
        show_table(
            ["RELEASE", "TRAFFIC", "ID"], [(one["version"], release_text(one), one["model_id"]) for one in releases]
        )
    if replicas := endpoint.get("replicas"):
        print()
        rows = [(one["id"], one["state"], f"{one['age_s']}s", one["reason"]) for one in replicas]
        show_table(["SEAT" if endpoint.get("host_id") else "REPLICA", "STATE", "AGE", "REASON"], rows)
    if guests := endpoint.get("guests"):
        print()
        rows = [
            (one["name"] or "(another tenant's)", one["state"], f"{one['age_s']}s", one["replica_id"]) for one in guests
        ]
        show_table(["GUEST", "STATE", "AGE", "REPLICA"], rows)
    if events := endpoint.get("events"):
        print()
        rows = [(moment(one["at"]), one["kind"], one["reason"], one.get("replica_id")) for one in events]
        show_table(["WHEN", "EVENT", "REASON", "REPLICA"], rows)


@command.command(
    "set",
    epilog="\b\nExample:\n  modelyard endpoints set demo --engine-timeout first_token=60 --sticky user\n"
    "  modelyard endpoints set demo --scale 0..4 --idle 10m\n  modelyard endpoints set demo --weight v2=10",
    short_help="Change how an endpoint is served and sized.",
)
@click.argument("name")
@click.option("--scale", type=Scale(), help="Replicas: 2, or bounds like 0..4.")
@click.option("--idle", "idle_s", type=DURATION, help="Quiet time before 0 replicas, fixed from then on.")
@click.option(
    "--weight", "weights", type=Share(), multiple=True, metavar="VERSION=PERCENT", help="Share of the traffic."
)
@click.option("--shadow", "shadows", type=Share(), multiple=True, metavar="VERSION=PERCENT", help="Share of copies.")
@click.option(
    "--fallback",
    "fallbacks",
    type=Share(),
    multiple=True,
    metavar="VERSION=TURN",
    help="Answers what the others have no room for, 1 first; 0: no more.",
)
@serving_options
@autoscale_options
@connected
@formats("Print only the endpoint's id.")
def change(name: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Change how an endpoint is served and sized, now; what is left out stays.

    Releases that are not named share what is left.
    """
    if not (body := change_body(**given)):
        raise click.UsageError(
            "Nothing to change; give --scale, --idle, --tier, --autoscale, --weight, --shadow, --fallback or an option "
            "of serving"
        )
    path = f"/v1/endpoints/{segment(name)}"
    endpoint = ask_of(platform, name, lambda path: platform.patch(path, body), path)
    _show_change(endpoint, f"Changed '{endpoint['name']}'.", is_json=is_json, is_quiet=is_quiet)


def change_body(
    *,
    scale: tuple[int, int] | None,
    idle_s: float | None,
    weights: tuple[tuple[str, int], ...],
    shadows: tuple[tuple[str, int], ...],
    fallbacks: tuple[tuple[str, int], ...],
    serving: Item,
    autoscale: Item,
) -> Item:
    """Return the body of ``PATCH /v1/endpoints/{endpoint}`` for a command line."""
    body: Item = {"serving": serving} if serving else {}
    if autoscale:
        body["autoscale"] = autoscale
    if scale is not None:
        body["hardware"] = {"min_replicas": scale[0], "max_replicas": scale[1]}
        body["scaling"] = {"scale_to_zero": scale[0] == 0}
    if idle_s is not None:
        body.setdefault("scaling", {})["scale_to_zero_after_idle_seconds"] = idle_s
    shares: dict[str, Item] = {}
    for kind, given in (("weight", weights), ("shadow", shadows), ("fallback", fallbacks)):
        for version, share in given:
            shares.setdefault(version, {"version": version})[kind] = share
    if shares:
        body["releases"] = list(shares.values())
    return body


@command.command(
    "add-release",
    epilog="\b\nExample:\n  modelyard endpoints add-release demo ./better.gguf --shadow 10\n"
    "  modelyard endpoints add-release demo ./better.gguf --version v2 --weight 10\n"
    "  modelyard endpoints add-release demo --engine openai --option model=gpt-5-mini "
    "--option key_env=MODELYARD_PROVIDER_OPENAI --fallback",
    short_help="Add a version to an endpoint, with a share of its traffic.",
)
@click.argument("name")
@click.argument("source", metavar="[PATH|URI]", required=False)
@click.option("--engine", help=f"{one_of()}. [default: by the content, of GGUF and ONNX]")
@click.option("--option", "options", multiple=True, metavar="K=V", help="A setting of the engine; repeatable.")
@click.option("--version", help="Name of this version. [default: the next of v1, v2, …]")
@click.option("--base", metavar="NAME@VERSION", help="What the adapter at PATH is loaded onto.")
@click.option("--weight", type=click.IntRange(0, 100), default=0, help="Percent of the requests that it answers.")
@click.option("--shadow", type=click.IntRange(0, 100), default=0, help="Percent that is copied to it, unanswered.")
@click.option("--fallback", "is_fallback", is_flag=True, help="Let it answer what the others have no room for.")
@click.option("--turn", type=click.IntRange(1, 16), default=1, help="Of several fallbacks, 1 comes first.")
@connected
@formats("Print only the endpoint's id.")
def add_release(
    name: str, *, platform: Platform, weight: int, shadow: int, is_fallback: bool, turn: int, **given: Any
) -> None:
    """Add the model at PATH or URI to the endpoint NAME; the other releases share what it leaves."""
    is_json, is_quiet = given.pop("is_json"), given.pop("is_quiet")
    body = version_body(**given) | {"weight": weight, "shadow": shadow, "fallback": turn if is_fallback else 0}
    path = f"/v1/endpoints/{segment(name)}/releases"
    file = local_file(body)

    def add(path: str) -> Item:
        return send_order(platform, body, file, lambda order: platform.post(path, order), is_uploading=False)

    endpoint = ask_of(platform, name, add, path)
    new = endpoint["releases"][-1]
    # One with all traffic has none yet: it takes over as its replicas become ready.
    share = "it takes over replica by replica" if weight == 100 and new["weight"] < 100 else release_text(new)
    _show_change(endpoint, f"Added {new['version']} to '{name}': {share}.", is_json=is_json, is_quiet=is_quiet)


@command.command(
    "rm-release",
    epilog="\b\nExample:\n  modelyard endpoints rm-release demo v1",
    short_help="Take a version from an endpoint; the others share its traffic.",
)
@click.argument("name")
@click.argument("version")
@connected
def remove_release(name: str, version: str, *, platform: Platform) -> None:
    """Take VERSION from the endpoint NAME; its requests are finished, and the others share what it had."""
    platform.delete(f"/v1/endpoints/{segment(name)}/releases/{segment(version)}")
    remark(f"Took {version} from '{name}'; its replicas finish what they are doing and stop.")


@command.command(
    "rm",
    epilog="\b\nExample:\n  modelyard endpoints rm demo",
    short_help="Remove an endpoint; running requests are finished.",
)
@click.argument("name")
@click.option("--force", is_flag=True, help="Also while guests sit on its replicas; they are left without a host.")
@connected
def remove(name: str, *, force: bool, platform: Platform) -> None:
    """Remove an endpoint; running requests are finished, and its usage stays in the ledger."""
    query = "?force=true" if force else ""
    try:
        ask_of(platform, name, lambda path: platform.delete(f"{path}{query}"), f"/v1/endpoints/{segment(name)}")
    except Refused as error:
        raise error.reworded("?force=true", "--force") from error
    remark(f"Removed '{name}'; its replicas finish what they are doing and stop.")


def _show_change(endpoint: Item, done: str, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(endpoint)
    elif is_quiet:
        print(endpoint["id"])
    else:
        print(f"{done} See: modelyard endpoints {endpoint['name']}")


def _guests(endpoint: Item) -> str:
    if not endpoint.get("guests_max"):
        return ""
    replicas = max(1, endpoint["current_replicas"])
    return (
        f"{len(endpoint['guests'])} of {replicas * endpoint['guests_max']} seats ({endpoint['guests_max']} a replica)"
    )


def _scale(endpoint: Item) -> str:
    least = 0 if endpoint["scale_to_zero"] else endpoint["min_replicas"]
    text = f"{least}..{endpoint['max_replicas']}"
    if endpoint["scale_to_zero"]:
        idle_s = f"{endpoint['scale_to_zero_after_idle_seconds']:g} s"
        is_fixed = endpoint["autoscale"]["idle"] == "fixed"
        text += (
            f", to 0 after {idle_s} without a request"
            if is_fixed
            else f", to 0 when its gaps say so ({idle_s} at first)"
        )
    return text
