"""``modelyard models versions`` and ``rm``: what the registry has of a model, and to forget one."""

from collections.abc import Callable

import click

from modelyard.cli.bars import size_text
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import PAGE, Platform, close_names, connected, segment
from modelyard.cli.output import Item, age, clean, listing, remark, show_list

REGISTRY = "/v1/registry/models"
_NONE = "No versions. Deploy a model: modelyard deploy ./model.gguf --name demo --wait"


@click.command(
    "versions",
    epilog="\b\nExample:\n  modelyard models versions\n  modelyard models versions smol --json",
    short_help="List the versions of a model, or of all.",
)
@click.argument("name", required=False)
@connected
@listing
def versions(name: str | None, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List the versions of the model NAME, or of all models, with what each came after."""
    found = platform.all(REGISTRY, name=name, limit=PAGE)
    if not found and name is not None:
        names = sorted({str(one["name"]) for one in platform.all(REGISTRY, limit=PAGE)})
        raise Failure(f"There is no model '{name}'. {close_names(name, names)}", Exit.NOT_FOUND)
    found.sort(key=lambda one: (one["created_at"], len(one["version"]), one["version"]))
    columns: dict[str, Callable[[Item], object]] = {} if name else {"MODEL": lambda one: one["name"]}
    columns |= {
        "VERSION": lambda one: one["version"],
        "STATUS": lambda one: one["status"],
        "ENGINE": lambda one: one["framework"],
        "SIZE": lambda one: size_text(one["artifact_size"]) if one["artifact_size"] else None,
        "DIGEST": lambda one: one["artifact_digest"].removeprefix("sha256:")[:12],
        "AFTER": lambda one: one["parent"],
        "BASE": lambda one: one["base"],
        "AGE": lambda one: age(one["created_at"]),
        "ID": lambda one: one["id"],
    }
    show_list(found, columns, is_json=is_json, is_quiet=is_quiet, empty=_NONE)


@click.command(
    "rm",
    epilog="\b\nExample:\n  modelyard models rm smol@v1",
    short_help="Remove a version that nothing uses.",
)
@click.argument("version", metavar="NAME@VERSION|ID")
@connected
def remove(version: str, *, platform: Platform) -> None:
    """Remove a version from the registry; one that an endpoint uses stays."""
    if "@" in version:
        name = version.partition("@")[0]
        found = [one for one in platform.all(REGISTRY, name=name, limit=PAGE) if f"{name}@{one['version']}" == version]
        if not found:
            references = sorted({f"{one['name']}@{one['version']}" for one in platform.all(REGISTRY, limit=PAGE)})
            raise Failure(f"There is no version '{version}'. {close_names(version, references)}", Exit.NOT_FOUND)
        if len(found) > 1:
            raise Failure(f"Several tenants have '{version}'. Give the id; 'models versions {name}' shows it.")
        version = found[0]["id"]
    elif not version.startswith("ver-"):
        raise click.UsageError(f"'{clean(version)}' names no version. Write NAME@VERSION; 'models versions NAME' lists")
    platform.delete(f"{REGISTRY}/{segment(version)}")
    remark(f"Removed {version}.")
