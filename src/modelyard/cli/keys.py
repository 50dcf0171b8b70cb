"""``modelyard keys``: API keys. A key's text is printed once, at its creation or rotation."""

from collections.abc import Sequence
from typing import Any

import click

from modelyard.cli.exits import Failure
from modelyard.cli.http import PAGE, Platform, close_names, connected, segment
from modelyard.cli.limits import limit_options, limits_text, spent_pairs
from modelyard.cli.nouns import DURATION, NounGroup
from modelyard.cli.output import Item, age, formats, listing, moment, owners, remark, show_json, show_list, show_pairs
from modelyard.clock import SystemClock

_EXAMPLE = """\b
Example:
  modelyard keys create "batch jobs" --rpm 600 --usd-per-month 20 --model demo
  modelyard keys
  modelyard keys show 3kf8x2ma
  modelyard keys rotate 3kf8x2ma --overlap 1h
  modelyard keys revoke 3kf8x2ma"""


@click.group(
    "keys",
    cls=NounGroup,
    epilog=_EXAMPLE,
    short_help="Create, list, limit, revoke and rotate API keys.",
)
def command() -> None:
    """Create, list, show, limit, revoke and rotate API keys; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard keys list --json")
@connected
@listing
def list_keys(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List the keys that you may see; their secrets are never shown."""
    columns = {
        "ID": lambda key: key["id"],
        "NAME": lambda key: key["name"],
        "KEY": lambda key: f"{key['prefix']}_…{key['last4']}",
        "SCOPES": lambda key: ",".join(key["scopes"]),
        "MODELS": lambda key: "all" if key["models"] is None else ",".join(key["models"]),
        "LIMITS": lambda key: limits_text(key["limits"]),
        "STATUS": lambda key: key["status"],
        "EXPIRES": lambda key: moment(key["expires_at"]) if key["expires_at"] else "never",
        "AGE": lambda key: age(key["created_at"]),
    }
    keys = platform.all("/v1/keys", limit=PAGE)
    columns |= owners(keys, "tenant_id")
    show_list(keys, columns, is_json=is_json, is_quiet=is_quiet, empty="No keys. Make one: modelyard keys create NAME")


@command.command("create", epilog="\b\nExample:\n  modelyard keys create ci --model demo --rpm 60 --expires 30d")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    default=["inference"],
    show_default=True,
    type=click.Choice(["inference", "manage", "admin"]),
    help="What it may do; repeatable.",
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Endpoint it may call; repeatable. [default: all]"
)
@limit_options
@click.option("--expires", "expires_in_s", type=DURATION, help="When it ends, from now: 12h, 30d.")
@click.option("--tenant", "tenant_id", metavar="ID", help="Owner, when it is another tenant (admin only).")
@connected
@formats("Print only the key.")
def create(*, platform: Platform, limits: Item, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Make a key called NAME and print it, this once."""
    body: Item = {"name": given["name"], "scopes": list(given["scopes"]), "limits": limits}
    if given["models"]:
        body["models"] = list(given["models"])
    if given["tenant_id"]:
        body["tenant_id"] = given["tenant_id"]
    if given["expires_in_s"] is not None:
        body["expires_at"] = int(SystemClock.unix_s() + given["expires_in_s"])
    _show_new(platform.post("/v1/keys", body), is_json=is_json, is_quiet=is_quiet)
    if given["models"] and not given["tenant_id"]:
        _warn_of_unknown(platform, given["models"])


def _warn_of_unknown(platform: Platform, models: Sequence[str]) -> None:
    """Say which of a new key's models are not there: one may be deployed later, so it is no mistake for sure."""
    try:
        names = {one["name"] for one in platform.all("/v1/endpoints", limit=PAGE)}
        unknown = [name for name in models if name not in names]
        if unknown:  # what others share is called, and not among the own endpoints
            names |= {one["id"] for one in platform.get("/v1/models")["data"]}
    except Failure:
        return  # the key is made, whatever else fails
    for name in unknown:
        if name not in names:
            remark(f"Warning: there is no endpoint '{name}' yet. {close_names(name, sorted(names))}")


@command.command("show", epilog="\b\nExample:\n  modelyard keys show 3kf8x2ma")
@click.argument("key_id")
@connected
@formats("Print only the key's id.")
def show(key_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a key, its limits and what it spent of them."""
    _show(platform.get(f"/v1/keys/{segment(key_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("limit", epilog="\b\nExample:\n  modelyard keys limit 3kf8x2ma --rpm 60 --usd-per-month 20")
@click.argument("key_id")
@limit_options
@connected
@formats("Print only the key's id.")
def limit(key_id: str, *, platform: Platform, limits: Item, is_json: bool, is_quiet: bool) -> None:
    """Replace all limits of a key; without options: lift them. What was used of one stays used."""
    _show(platform.patch(f"/v1/keys/{segment(key_id)}", {"limits": limits}), is_json=is_json, is_quiet=is_quiet)


@command.command("revoke", epilog="\b\nExample:\n  modelyard keys revoke 3kf8x2ma")
@click.argument("key_id")
@connected
def revoke(key_id: str, *, platform: Platform) -> None:
    """End a key for good."""
    platform.delete(f"/v1/keys/{segment(key_id)}")
    remark(f"Revoked {key_id}; gateways refuse it from now on.")


@command.command("rotate", epilog="\b\nExample:\n  modelyard keys rotate 3kf8x2ma --overlap 1h")
@click.argument("key_id")
@click.option(
    "--overlap", "overlap_s", type=DURATION, default="1h", show_default=True, help="How long the old one works."
)
@connected
@formats("Print only the key.")
def rotate(key_id: str, *, overlap_s: float, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Give a key a new secret and print it, this once."""
    answer = platform.post(f"/v1/keys/{segment(key_id)}/rotate", {"overlap_s": int(overlap_s)})
    _show_new(answer, is_json=is_json, is_quiet=is_quiet)
    if (until := answer["previous_expires_at"]) and not (is_json or is_quiet):
        remark(f"The old key works until {moment(until)}.")


def _show_new(key: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(key)
    elif is_quiet:
        print(key["key"])
    else:
        expires = moment(key["expires_at"]) if key["expires_at"] else "never"
        show_pairs({"ID": key["id"], "Name": key["name"], "Key": key["key"], "Expires": expires})
        remark("Keep the key now: it is not shown again.")


def _show(key: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(key)
    elif is_quiet:
        print(key["id"])
    else:
        expires = moment(key["expires_at"]) if key["expires_at"] else "never"
        about = {"ID": key["id"], "Name": key["name"], "Status": key["status"], "Expires": expires}
        show_pairs(
            about | {"Limits": limits_text(key["limits"], key["spent"])} | spent_pairs(key["limits"], key["spent"])
        )
