"""``modelyard tenants``: customers, their limits, plans and weights (admin only)."""

from typing import Any

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.limits import limits_text, spent_pairs, tenant_limit_options
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, age, formats, listing, show_json, show_list, show_pairs

_EXAMPLE = """\b
Example:
  modelyard tenants create acme --plan priority --usd-per-month 500
  modelyard tenants
  modelyard tenants limit ten-3kf8x2ma --rpm 6000
  modelyard tenants suspend ten-3kf8x2ma"""

_PLAN = click.option(
    "--plan",
    type=click.Choice(["priority", "standard", "batch"]),
    help="How urgent its requests are. [default: standard]",
)
_WEIGHT = click.option(
    "--weight", type=click.FloatRange(0.01, 1000), help="Its share of a saturated endpoint. [default: 1]"
)


@click.group("tenants", cls=NounGroup, epilog=_EXAMPLE, short_help="Create, list, show and change tenants.")
def command() -> None:
    """Create, list, show and change tenants; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard tenants list --json")
@connected
@listing
def list_tenants(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List all tenants."""
    columns = {
        "ID": lambda tenant: tenant["id"],
        "NAME": lambda tenant: tenant["name"],
        "PLAN": lambda tenant: tenant["plan"],
        "WEIGHT": lambda tenant: f"{tenant['weight']:g}",
        "LIMITS": lambda tenant: limits_text(tenant["limits"]),
        "STATUS": _status,
        "AGE": lambda tenant: age(tenant["created_at"]),
    }
    tenants = platform.all("/v1/tenants", limit=PAGE)
    show_list(tenants, columns, is_json=is_json, is_quiet=is_quiet, empty="No tenants.")


@command.command("create", epilog="\b\nExample:\n  modelyard tenants create acme --plan batch --tokens-per-day 5000000")
@click.argument("name")
@_PLAN
@_WEIGHT
@tenant_limit_options
@connected
@formats("Print only the tenant's id.")
def create(*, platform: Platform, limits: Item, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Make a tenant called NAME."""
    body: Item = {"name": given["name"], "limits": limits, **_given(given)}
    _show(platform.post("/v1/tenants", body), is_json=is_json, is_quiet=is_quiet)


@command.command("show", epilog="\b\nExample:\n  modelyard tenants show ten-3kf8x2ma")
@click.argument("tenant_id")
@connected
@formats("Print only the tenant's id.")
def show(tenant_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a tenant, its limits and what it spent of them."""
    _show(platform.get(f"/v1/tenants/{segment(tenant_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("set", epilog="\b\nExample:\n  modelyard tenants set ten-3kf8x2ma --plan priority --weight 4")
@click.argument("tenant_id")
@click.option("--name", help="Another name.")
@_PLAN
@_WEIGHT
@connected
@formats("Print only the tenant's id.")
def change(tenant_id: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Change name, plan or weight; what is left out stays."""
    body = _given(given) | ({"name": given["name"]} if given["name"] is not None else {})
    if not body:
        raise click.UsageError("Nothing to change; give --name, --plan or --weight")
    _show(platform.patch(f"/v1/tenants/{segment(tenant_id)}", body), is_json=is_json, is_quiet=is_quiet)


@command.command("limit", epilog="\b\nExample:\n  modelyard tenants limit ten-3kf8x2ma --rpm 600 --usd-per-month 20")
@click.argument("tenant_id")
@tenant_limit_options
@connected
@formats("Print only the tenant's id.")
def limit(tenant_id: str, *, platform: Platform, limits: Item, is_json: bool, is_quiet: bool) -> None:
    """Replace all limits of a tenant; without options: lift them. What was used of one stays used."""
    path = f"/v1/tenants/{segment(tenant_id)}"
    _show(platform.patch(path, {"limits": limits}), is_json=is_json, is_quiet=is_quiet)


@command.command("suspend", epilog="\b\nExample:\n  modelyard tenants suspend ten-3kf8x2ma")
@click.argument("tenant_id")
@connected
@formats("Print only the tenant's id.")
def suspend(tenant_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Stop all keys of a tenant until it is resumed."""
    path = f"/v1/tenants/{segment(tenant_id)}"
    _show(platform.patch(path, {"is_suspended": True}), is_json=is_json, is_quiet=is_quiet)


@command.command("resume", epilog="\b\nExample:\n  modelyard tenants resume ten-3kf8x2ma")
@click.argument("tenant_id")
@connected
@formats("Print only the tenant's id.")
def resume(tenant_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Let the keys of a suspended tenant work again."""
    path = f"/v1/tenants/{segment(tenant_id)}"
    _show(platform.patch(path, {"is_suspended": False}), is_json=is_json, is_quiet=is_quiet)


def _given(given: Item) -> Item:
    return {name: given[name] for name in ("plan", "weight") if given[name] is not None}


def _status(tenant: Item) -> str:
    return "suspended" if tenant["is_suspended"] else "active"


def _show(tenant: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(tenant)
    elif is_quiet:
        print(tenant["id"])
    else:
        about = {
            "ID": tenant["id"],
            "Name": tenant["name"],
            "Plan": tenant["plan"],
            "Weight": f"{tenant['weight']:g}",
            "Status": _status(tenant),
            "Limits": limits_text(tenant["limits"], tenant["spent"]),
        }
        show_pairs(about | spent_pairs(tenant["limits"], tenant["spent"]))
