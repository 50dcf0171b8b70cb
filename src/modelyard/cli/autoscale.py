"""How endpoints are sized, on the command line: options for ``deploy`` and ``endpoints set``, and how it is shown."""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from modelyard.cli.output import Item

_WORDS = {"true": True, "false": False, "null": None}
_TEXTS = {"tier", "idle", "burst_pool", "node_pool"}
_FLAGS = {"prewarm", "batch_scales"}
AUTO = "auto"
"""The tier that the traffic has it be in; null to the API."""


class Setting(click.ParamType[tuple[str, Any]]):
    """A setting by name: ``up_queue=50``."""

    name = "setting"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Return the name and the value as the API takes it; the API says which names there are."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([a-z_]+)=(.*)", str(value))
        if match is None:
            self.fail(f"'{value}' is no setting; write NAME=VALUE, as in up_queue=50.", param, ctx)
        name, text = match[1], match[2]
        if name == "tier" and text in {AUTO, "null"}:
            return name, None
        if name in _TEXTS:
            return name, text
        if text in _WORDS:
            return name, _WORDS[text]
        if name in _FLAGS:
            self.fail(f"'{text}' is neither true nor false; write {name}=true or {name}=false.", param, ctx)
        try:
            return name, int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        except ValueError:
            self.fail(f"'{text}' is no number; write {name}=NUMBER.", param, ctx)


_OPTIONS = (
    click.option(
        "--autoscale",
        "settings",
        type=Setting(),
        multiple=True,
        metavar="NAME=VALUE",
        help="When and how far the size changes, like up_queue=50; repeatable.",
    ),
    click.option(
        "--tier", type=click.Choice(["hot", "warm", "cold", AUTO]), help="Pin how close to answering it stays."
    ),
)


def autoscale_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it gets them as one body, ``autoscale``, of what was given."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        autoscale: Item = dict(given.pop("settings"))
        if tier := given.pop("tier"):
            autoscale["tier"] = None if tier == AUTO else tier
        return command(autoscale=autoscale, **given)

    for option in reversed(_OPTIONS):
        option(run)
    return run


def size_text(endpoint: Item) -> str | None:
    """Return the size that an endpoint should have and why; None before that was decided."""
    size = endpoint.get("size")
    if size is None:
        return None
    seen = size["seen"]
    parts = [f"{size['replicas']}: {size['reason']}"]
    if seen.get("ready"):
        parts.append(f"busy {100 * seen['utilization']:.0f} %")
        if seen.get("kv_use") is not None:
            parts.append(f"KV {100 * seen['kv_use']:.0f} %")
        if seen.get("tokens_s"):
            parts.append(f"{seen['tokens_s']:.0f} tokens/s")
    return "; ".join(parts)


def tier_text(endpoint: Item) -> str | None:
    """Return the tier that an endpoint is in, and why."""
    tier = endpoint.get("tier")
    return f"{tier['tier']}: {tier['reason']}" if tier else None
