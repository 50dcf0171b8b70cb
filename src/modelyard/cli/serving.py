"""The options for how an endpoint is served, shared by ``deploy`` and ``endpoints set``, and the same as text."""

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item

_TIMEOUTS = ("connect", "first_token", "token", "total")


class EngineTimeout(click.ParamType[tuple[str, float | None]]):
    """How long the engine gets: ``first_token=60``, ``total=10m``, or ``token=default``."""

    name = "engine time-out"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float | None]:
        """Return the field of the API and seconds, None for the gateway's own setting."""
        if isinstance(value, tuple):
            return value
        name, _, length = str(value).partition("=")
        if name not in _TIMEOUTS or not length:
            self.fail(f"'{value}' is no time-out; write {'|'.join(_TIMEOUTS)}=60s, or =default.", param, ctx)
        return f"{name}_s", None if length == "default" else DURATION.convert(length, param, ctx)


class Share(click.ParamType[tuple[str, int]]):
    """A percentage of a version: ``v2=10``."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return the version and its percentage."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([^=]+)=(\d{1,3})%?", str(value))
        if match is None:
            self.fail(f"'{value}' is no share; write VERSION=PERCENT, as in v2=10.", param, ctx)
        return match[1], int(match[2])


_PLAIN = ("coalesce_ms", "sticky", "fallback_after_s")
_OPTIONS = (
    click.option(
        "--engine-timeout",
        "engine_timeouts",
        type=EngineTimeout(),
        multiple=True,
        metavar="NAME=TIME",
        help="Patience with the engine: connect, first_token, token or total; repeatable.",
    ),
    click.option("--coalesce-ms", type=click.IntRange(0, 1000), help="Send tokens of a stream in groups of this time."),
    click.option(
        "--sticky", type=click.Choice(["none", "key", "user"]), help="Whose requests stay on one release and replica."
    ),
    click.option(
        "--fallback-after",
        "fallback_after_s",
        type=DURATION,
        help="Wait for a release with weight before a fallback answers. [default: 0s]",
    ),
)


def serving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it gets them as one body, ``serving``, of what was given."""

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        serving: Item = {name: value for name in _PLAIN if (value := given.pop(name)) is not None}
        if timeouts := dict(given.pop("engine_timeouts")):
            serving["timeouts"] = timeouts
        return command(serving=serving, **given)

    for option in reversed(_OPTIONS):
        option(run)
    return run


def serving_text(serving: Item) -> str:
    """Return in one line what is not as the gateway's own settings have it."""
    given = {name.removesuffix("_s"): value for name, value in serving["timeouts"].items() if value is not None}
    parts = [f"{name} within {value:g} s" for name, value in given.items()]
    if serving["coalesce_ms"]:
        parts.append(f"tokens in groups of {serving['coalesce_ms']} ms")
    if serving["sticky"] != "none":
        parts.append(f"sticky by {serving['sticky']}")
    if serving.get("fallback_after_s"):
        parts.append(f"a fallback answers after {serving['fallback_after_s']:g} s")
    return ", ".join(parts)


def release_text(release: Item) -> str:
    """Return the share of a release: ``90 %``, ``copies of 10 %``, ``what the others have no room for``, …"""
    if release["shadow"]:
        return f"copies of {release['shadow']} %"
    if release.get("fallback"):
        return "what the others have no room for" + (f", turn {release['fallback']}" if release["fallback"] > 1 else "")
    return f"{release['weight']} %" if release["weight"] else "no traffic"
