"""The entry point: ``modelyard``.

Only click is imported here; a command's own module is loaded when that command
runs, so that ``--version`` and ``--help`` answer at once. Every way a command
can end becomes an exit code in ``main`` (``exits.py`` has the table).
"""

import importlib
import os
import sys
from collections.abc import Sequence

import click

from modelyard import __version__

_COMMANDS = {
    "up": "Start the platform on this machine.",
    "restart": "Restart the running platform without losing a request.",
    "down": "Stop the platform that runs in the data directory.",
    "status": "Show whether the platform is well.",
    "deploy": "Deploy a model and get an endpoint.",
    "endpoints": "List, show, change or remove endpoints.",
    "canary": "Try a new version on a part of the traffic.",
    "rollback": "Give the previous version all traffic again.",
    "rollout": "Show, pause, resume or undo a change of versions.",
    "models": "List, inspect, convert, upload and remove models.",
    "fit": "Say what fits a model: precision, accelerators, speed, price.",
    "bench": "Measure an endpoint under load.",
    "sim": "Simulate: other policies, hardware, traffic.",
    "nodes": "List nodes, what runs on their accelerators, and what is free.",
    "pools": "List, set and remove warm pools of loaded models.",
    "run": "Chat with a model.",
    "files": "Upload, list, fetch and remove files.",
    "keys": "Create, list, limit, revoke and rotate API keys.",
    "tenants": "Create, list, show and change tenants.",
    "usage": "Show tokens and cost, or export them.",
    "prices": "Show, set and end prices of models.",
    "credits": "Show and give credit; set how tenants pay.",
    "budgets": "List, make and remove budgets.",
    "invoices": "List, show, issue and take back invoices.",
    "costs": "Show what GPUs cost, and what is wasted.",
    "reconcile": "Say whether the books balance.",
    "forecast": "Show when requests are expected, and replay.",
    "batch": "Submit, list, show and cancel batches.",
    "requests": "List, show or cancel detached requests.",
    "webhooks": "Add, test, replay and remove webhooks; see what they got.",
    "why": "Say why an endpoint or a request is as it is.",
    "logs": "Show the logs of an endpoint or of the platform.",
    "completion": "Print the completion script of a shell.",
}
"""Every command with its one line of help; the module ``cli/<name>.py`` has it as ``command``."""
_ELSEWHERE = {name: ("rollouts", name) for name in ("canary", "rollback", "rollout")}
"""Commands that share a module, with its name and theirs in it."""


class _LazyGroup(click.Group):
    """A group that loads a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _ELSEWHERE.get(cmd_name, (cmd_name, "command"))
        command: click.Command = getattr(importlib.import_module(f"modelyard.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(args[0], possibilities=_COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  modelyard up\n  modelyard deploy ./model.gguf --name demo --wait\n"
    "  modelyard run demo 'Hello'",
)
@click.version_option(__version__, prog_name="modelyard", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
def cli() -> None:
    """Serve models behind one OpenAI-compatible API, on your own machines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options_end = given.index("--") if "--" in given else len(given)
    is_debug = "--debug" in given[:options_end]  # taken anywhere on the line, since one adds it when something failed
    given = [argument for at, argument in enumerate(given) if argument != "--debug" or at > options_end]
    try:
        # Here click gives back the code of a ``ctx.exit(code)``, and otherwise what the command returned: None.
        code = cli.main(args=given, prog_name="modelyard", standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        _show_usage_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        _say("")
        return 130
    except click.Abort:  # what click makes of a KeyboardInterrupt, after an empty line
        return 130
    except BrokenPipeError:
        # The reader has gone (``| head``). What is still buffered would fail again when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # noqa: BLE001 - boundary: anything becomes one line and a code
        if is_debug:
            import traceback

            _say(traceback.format_exc().rstrip())
        return _explain(error)


def _show_usage_error(error: click.ClickException) -> None:
    message = error.format_message()
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _say(message)
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else "modelyard"
    message = message.replace("\n", " ")
    _say(f"Error: {message}{'' if message.endswith(('.', '?', '!')) else '.'} See '{path} --help'.")


def _explain(error: Exception) -> int:
    from modelyard.cli.exits import Exit, Failure
    from modelyard.errors import StartupError

    if isinstance(error, Failure | StartupError):
        _say(f"Error: {error}")
        return int(error.exit_code)
    reason = str(error).replace("\n", " ") or type(error).__name__
    _say(f"Error: {type(error).__name__}: {reason}. This is a bug; run again with --debug and report what it prints.")
    return int(Exit.FAILURE)


def _say(line: str) -> None:
    print(line, file=sys.stderr)
