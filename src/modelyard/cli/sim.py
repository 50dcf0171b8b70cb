"""``modelyard sim``: what would happen with another policy, another kind of hardware or other traffic."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.output import Item, formats, show_json, show_table
from modelyard.cli.sim_output import Asked, Progress, output_options, show
from modelyard.cli.sim_replay import REPLAY_NAMES, replay_ledger, replay_options

if TYPE_CHECKING:
    from modelyard.sim.scenario_file import Fault

FILE_BYTES_MAX = 1024 * 1024
_EXAMPLE = """\b
Example:
  modelyard sim examples
  modelyard sim canary
  modelyard sim examples show canary > mine.toml
  modelyard sim mine.toml --seeds 3 --html mine.html
  modelyard sim --replay --last 24h --set scaling.max_replicas=4"""


class _SimGroup(click.Group):
    """A group whose argument, where it is no verb, is the scenario to run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--replay" in args:
            args = ["replay", *(one for one in args if one != "--replay")]
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    "sim",
    cls=_SimGroup,
    epilog=_EXAMPLE,
    short_help="Simulate: other policies, hardware, traffic.",
    no_args_is_help=True,
)
def command() -> None:
    """Simulate what would happen, decided by the code that decides live: 'sim SCENARIO' is 'sim run SCENARIO'."""


@command.command("run", epilog=_EXAMPLE, short_help="Run a scenario.")
@click.argument("scenario")
@click.option("--seeds", type=click.IntRange(1, 100), help="Run with so many seeds. [default: as the file says, or 1]")
@output_options
def run(scenario: str, *, seeds: int | None, **given: Any) -> None:
    """Run SCENARIO, a file or the name of an example, and print its variants side by side.

    Times are virtual: a day passes in seconds or minutes. The same file and seeds give the same figures. With several
    seeds a figure is its mean, and from the least to the most.
    """
    asked = Asked(**given)
    asked.check()
    text, file = _text(scenario)
    from modelyard.sim.scenario_file import ScenarioError
    from modelyard.sim.scenarios import run as run_scenario
    from modelyard.sim.scenarios import scenario_of

    try:
        ready = scenario_of({"title": file.stem, **_decoded(text, file)}, file.parent, seeds=seeds)
        progress = Progress(ready.number)
        try:
            results = run_scenario(ready, None if asked.is_quiet else progress)
        finally:
            progress.clear()
    except ScenarioError as error:
        raise Failure(f"{file}: {_listed(error.faults, text)}", Exit.USAGE) from error
    except ImportError as error:
        raise Failure("A fleet needs numpy: pip install 'modelyard[sim]'.") from error
    show(results, asked)


@command.command(
    "replay",
    epilog="\b\nExample:\n  modelyard sim replay --last 24h --set scaling.max_replicas=4\n"
    "  modelyard sim --replay --endpoint chat --hardware h100\n"
    "  modelyard sim replay --usage november.csv --runs-on l4 --traffic x2",
    short_help="Replay the own ledger's traffic.",
)
@replay_options
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Run with so many seeds.")
@output_options
def replay(*, seeds: int, **given: Any) -> None:
    """Replay recorded traffic with other settings, hardware, prices or amounts, beside what was recorded.

    It is read from the ledger of a platform on this machine, which may run or not, or from what 'usage export' wrote.
    Prompts are not in it. 'sim --replay' is the same.
    """
    own = {name: given.pop(name) for name in REPLAY_NAMES}
    replay_ledger(forms=Asked(**given), seeds=seeds, **own)


@command.group(
    "examples",
    invoke_without_command=True,
    epilog="\b\nExample:\n  modelyard sim examples\n  modelyard sim examples show canary > mine.toml",
    short_help="List scenarios that come with Modelyard, or print one.",
)
@formats("Print only names, one a line.")
@click.pass_context
def examples(ctx: click.Context, *, is_json: bool, is_quiet: bool) -> None:
    """List the scenarios that come with Modelyard: each runs by its name, in less than half a minute."""
    if ctx.invoked_subcommand is not None:
        return
    from modelyard.sim.examples import names, title

    found = [{"name": name, "title": title(name)} for name in names()]
    if is_json:
        show_json(found)
    elif is_quiet:
        for one in found:
            print(one["name"])
    else:
        show_table(["NAME", "SHOWS"], [(one["name"], one["title"]) for one in found])


@examples.command("show", epilog="\b\nExample:\n  modelyard sim examples show canary > mine.toml")
@click.argument("name")
def show_example(name: str) -> None:
    """Print the example NAME, to begin one's own with."""
    from modelyard.sim.examples import names, text

    if name not in names():
        raise Failure(_no_such(name, names()), Exit.NOT_FOUND)
    print(text(name), end="")


def _text(scenario: str) -> tuple[str, Path]:
    """Return a scenario's text and file: a file of this machine, else an example."""
    from modelyard.sim.examples import FOLDER, names

    file = Path(scenario).expanduser()
    if not file.exists() and scenario in names():
        file = FOLDER / f"{scenario}.toml"
    elif not file.exists():
        raise Failure(_no_such(scenario, names()), Exit.NOT_FOUND)
    try:
        with file.open("rb") as reader:
            content = reader.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise Failure(f"{file} is larger than {FILE_BYTES_MAX:,} bytes; a scenario is a few lines.", Exit.USAGE)
        return content.decode("utf-8"), file
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}.", Exit.NOT_FOUND) from error
    except UnicodeDecodeError as error:
        raise Failure(f"{file} is not UTF-8.", Exit.USAGE) from error


def _no_such(name: str, known: Sequence[str]) -> str:
    from modelyard.cli.http import close_names

    close = close_names(name, list(known))
    return (
        f"There is neither a file nor an example '{name}'.{f' {close}' if close else ''} See 'modelyard sim examples'."
    )


def _decoded(text: str, file: Path) -> Item:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{file} is not valid TOML: {str(error) or 'it is nested too deeply'}.", Exit.USAGE) from error


def _listed(faults: "Sequence[Fault]", text: str) -> str:
    """Return ``line 7, hardware.gpu_type: why; …`` in the order of the lines."""
    from modelyard.cli.endpoint_file import lines_of_toml, listed

    return listed([(fault.param, fault.reason) for fault in faults], lines_of_toml(text))
