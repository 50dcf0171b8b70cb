"""Writes ``docs/reference/cli.md`` from the commands themselves; ``--check`` only says whether it is current.

Usage, description, arguments, options and examples come from click, the exit codes from ``cli/exits.py``, so that
the page cannot tell of an option that is gone.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from modelyard.cli.exits import Exit, exit_for
from modelyard.cli.main import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

INTRODUCTION = """# Command line

<!-- Written by tools/cli_reference.py: do not edit. -->

Commands find the platform of this machine, and its admin key, in the data directory. `--url` and `--key`, or
`MODELYARD_URL` and `MODELYARD_API_KEY`, name another. stdout carries data, stderr progress and remarks. Every
listing takes `--json` and `--quiet` (ids only). `--debug` shows a traceback when something fails.

## Exit codes

"""

MEANINGS = {
    Exit.OK: "done",
    Exit.FAILURE: "failed",
    Exit.USAGE: "the command line or the request is wrong",
    Exit.NOT_FOUND: "there is no such thing",
    Exit.AUTH: "no key, or not this key",
    Exit.LIMIT: "a limit is reached",
    Exit.UNAVAILABLE: "the platform, or a model, cannot be reached now",
    Exit.INTERRUPTED: "Ctrl-C",
}


def page() -> str:
    """Return the whole page."""
    lines = ["| code | means | HTTP status |", "|---:|---|---|"]
    for code in Exit:
        statuses = [str(status) for status in range(400, 600) if exit_for(status) is code and code is not Exit.FAILURE]
        lines.append(f"| {int(code)} | {MEANINGS[code]} | {', '.join(statuses)} |")
    parts = [INTRODUCTION + "\n".join(lines)]
    parts += _sections(cli, click.Context(cli, info_name="modelyard"))
    return "\n\n".join(parts) + "\n"


def _sections(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, "a listed command exists"
        inner = click.Context(command, info_name=name, parent=context)
        yield _section(command, inner)
        if isinstance(command, click.Group):
            yield from _sections(command, inner)


def _section(command: click.Command, context: click.Context) -> str:
    depth = "#" * (2 if context.parent is not None and context.parent.parent is None else 3)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"{depth} {context.command_path}", inspect.cleandoc(command.help or "").replace("\b\n", "")]
    parts.append(f"```text\n{usage}\n```")
    options = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
    shown = [record for record in options if record is not None]
    if shown:
        rows = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in shown]
        parts.append("\n".join(["| option | what |", "|---|---|", *rows]))
    if command.epilog:
        lines = inspect.cleandoc(command.epilog.replace("\b\n", "")).splitlines()
        examples = [line.strip() for line in lines if line.strip() and line.strip() != "Example:"]
        parts.append("```sh\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    text = page()
    if PAGE.exists() and PAGE.read_text("utf-8") == text:
        return 0
    if "--check" in arguments:
        sys.stdout.write("docs/reference/cli.md is not current. Run: python tools/cli_reference.py\n")
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
