"""Commands that are a noun: ``modelyard keys`` lists, ``modelyard endpoints demo`` shows one, verbs do the rest."""

import re
from datetime import UTC, datetime

import click

from modelyard.clock import SystemClock

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class NounGroup(click.Group):
    """A group that lists without a verb, and takes an argument that is no verb as what to ``show``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put in the verb ``list`` where there is none: ``keys --json`` is ``keys list --json``."""
        if not args or (args[0].startswith("-") and args[0] not in {"-h", "--help"}):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb, or ``show`` where there is one."""
        if args and args[0] not in self.commands and "show" in self.commands:
            return "show", self.commands["show"], args
        return super().resolve_command(ctx, args)


class Duration(click.ParamType[float]):
    """Seconds, or a number with a unit: ``90``, ``90s``, ``5m``, ``2h``, ``30d``."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(value))
        if match is None:
            self.fail(f"'{value}' is no duration; write 90s, 5m, 2h or 30d.", param, ctx)
        return float(match[1]) * _UNITS[match[2] or "s"]


DURATION = Duration()


class When(click.ParamType[float]):
    """A moment: so long ago (``2h``, ``30d``), or a date or time (``2026-11-01``, ``2026-11-01T09:00+01:00``; UTC)."""

    name = "when"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return unix seconds."""
        text = str(value)
        if isinstance(value, float):
            return value
        if re.fullmatch(r"\d+(?:\.\d+)?[smhdw]?", text):
            return max(0.0, SystemClock.unix_s() - DURATION.convert(text, param, ctx))
        try:
            read = datetime.fromisoformat(text)
            return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"'{text}' is no time; write 2h or 30d (so long ago), or a date like 2026-11-01.", param, ctx)


WHEN = When()
