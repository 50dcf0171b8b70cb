"""``modelyard bench``: how fast an endpoint, or any OpenAI-compatible server, answers under load."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelyard.cli.bars import is_terminal
from modelyard.cli.bench_report import show_comparison, show_run
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import Platform, close_names, data_dir_option, find_platform
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, ProgressLine, remark, show_json

if TYPE_CHECKING:
    from modelyard.loadtest.client import Target
    from modelyard.loadtest.driver import Level, Measured
    from modelyard.loadtest.workload import Ask

_LEVELS_MAX = 32
_PIPE_S = 5.0
"""A pipe gets a line of progress this often."""
_EXAMPLE = """\b
Example:
  modelyard bench demo
  modelyard bench demo --concurrency 1,4,16 --duration 1m --output a.json --picture a.svg
  modelyard bench demo --rate 5 --input-tokens lognormal:800:0.6 --output-tokens 200
  modelyard bench my-model --url http://10.0.0.5:8000 --key-env VLLM_API_KEY --requests 500
  modelyard bench compare a.json b.json"""


class _BenchGroup(click.Group):
    """A group whose argument, where it is no verb, is the endpoint to run against."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in {"-h", "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    "bench", cls=_BenchGroup, epilog=_EXAMPLE, short_help="Measure an endpoint under load.", no_args_is_help=True
)
def command() -> None:
    """Measure how fast an endpoint answers under load: 'bench ENDPOINT' is 'bench run ENDPOINT'."""


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with commas: ``1,4,16``."""

    name = "numbers"

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Return them, each above 0."""
        try:
            numbers = tuple(float(int(part)) if self._is_whole else float(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or len(numbers) > _LEVELS_MAX or not all(0 < number <= 10_000 for number in numbers):
            what = "whole numbers" if self._is_whole else "numbers"
            self.fail(
                f"'{value}' is no list of {what} from 1 to 10,000; write {'1,4,16' if self._is_whole else '0.5,2,8'}.",
                param,
                ctx,
            )
        return numbers


@command.command("run", epilog=_EXAMPLE, short_help="Measure an endpoint.")
@click.argument("endpoint")
@click.option(
    "--concurrency",
    type=Numbers(is_whole=True),
    help="Callers that wait for their answers; a list sweeps. [default: 1,4,16]",
)
@click.option("--rate", type=Numbers(is_whole=False), help="Requests a second that wait for nobody; a list sweeps.")
@click.option(
    "--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True, help="Of a --rate."
)
@click.option("--duration", "duration_s", type=DURATION, default="30s", show_default=True, help="Of each load.")
@click.option("--requests", type=click.IntRange(1), help="So many of each load, instead of --duration.")
@click.option(
    "--warmup", type=click.IntRange(0), help="Requests before each load, not counted. [default: as many as run at once]"
)
@click.option(
    "--input-tokens", default="256", show_default=True, help="Or uniform:100:900, normal:512:128, lognormal:512:0.6."
)
@click.option("--output-tokens", default="128", show_default=True, help="The same.")
@click.option(
    "--prefix-share", type=click.FloatRange(0, 1), default=0.0, help="Part of each prompt that is the same in all."
)
@click.option("--dataset", type=click.Path(path_type=Path), help="JSONL with messages or prompt, and output_tokens.")
@click.option("--route", type=click.Choice(["chat", "completions", "embeddings"]), default="chat", show_default=True)
@click.option("--no-stream", is_flag=True, help="Ask for whole answers.")
@click.option("--stop-at-eos", is_flag=True, help="Let the model end its answers; else they have exactly their length.")
@click.option("--timeout", "timeout_s", type=DURATION, default="2m", show_default=True, help="Of one request.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--url", metavar="URL", help="The platform, or any OpenAI-compatible server [env: MODELYARD_URL].")
@click.option("--key", metavar="KEY", help="API key [env: MODELYARD_API_KEY].")
@click.option("--key-env", metavar="NAME", help="Environment variable that has the key.")
@data_dir_option
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write a picture of the sweep (SVG).")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def run(endpoint: str, *, output: Path | None, picture: Path | None, is_json: bool, **given: Any) -> None:
    """Send requests to ENDPOINT and print how fast it answers.

    ENDPOINT is the name of a model, on the platform or at --url. Ctrl-C ends it with what there is.
    """
    for file in (output, picture):
        if file is not None and not file.absolute().parent.is_dir():
            raise Failure(f"Cannot write {file}: there is no such folder.", Exit.USAGE)
    levels = levels_of(given)
    target = _target(endpoint, given)
    result, is_stopped = _measure(target, levels, given)
    if output is not None:
        _write(output, _json(result))
    if picture is not None:
        from modelyard.loadtest.picture import draw

        _write(picture, draw(result["levels"], f"{endpoint}: {result['workload']['title']}"))
    if is_json:
        show_json(result)
    else:
        show_run(result)
    if is_stopped:
        raise KeyboardInterrupt
    if not any(level["completed"] for level in result["levels"]):
        raise Failure(f"No request to '{endpoint}' succeeded.", Exit.UNAVAILABLE)


@command.command("compare", epilog="\b\nExample:\n  modelyard bench compare before.json after.json")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def compare(first: Path, second: Path, *, is_json: bool) -> None:
    """Compare two results: ratios of the SECOND to the FIRST, for each load that both have."""
    from modelyard.loadtest.comparing import compare as compared
    from modelyard.loadtest.comparing import differences

    one, other = _read(first), _read(second)
    rows = compared(one, other)
    if not rows:
        raise Failure(f"{first} and {second} have no load in common.", Exit.USAGE)
    if is_json:
        show_json(rows)
        return
    show_comparison(rows)
    if unlike := differences(one, other):
        remark(f"They were not asked alike: {', '.join(unlike)} differ.")


def levels_of(given: Item) -> "list[Level]":
    """Return the loads that are asked for."""
    from modelyard.loadtest.driver import Level

    if given["concurrency"] and given["rate"]:
        raise click.UsageError("Give --concurrency or --rate, not both")
    common: Item = {"duration_s": given["duration_s"], "requests": given["requests"] or 0}
    warmup = given["warmup"]
    if rates := given["rate"]:
        return [
            Level(rate=rate, arrivals=given["arrivals"], warmup=2 if warmup is None else warmup, **common)
            for rate in rates
        ]
    counts = [int(count) for count in given["concurrency"] or (1, 4, 16)]
    return [Level(concurrency=count, warmup=count if warmup is None else warmup, **common) for count in counts]


def _target(endpoint: str, given: Item) -> "Target":
    from modelyard.loadtest.client import Target

    key, url = given["key"], given["url"]
    if (name := given["key_env"]) is not None:
        key = os.environ.get(name)
        if not key:
            raise Failure(f"The environment variable {name} is not set.", Exit.AUTH)
    options: Item = {
        "model": endpoint,
        "route": given["route"],
        "is_streamed": not given["no_stream"] and given["route"] != "embeddings",
        "ignores_eos": not given["stop_at_eos"],
        "timeout_s": given["timeout_s"],
    }
    if url is not None and key is None and "MODELYARD_API_KEY" not in os.environ:
        if not url.startswith(("http://", "https://")):
            raise Failure(f"Bad --url '{url}': it must begin with http:// or https://.", Exit.USAGE)
        return Target(url=url.rstrip("/").removesuffix("/v1"), **options)
    platform = find_platform(url=url, key=key, data_dir=given["data_dir"])
    return Target(url=platform.url, key=platform.key, certificate=platform.certificate, **options)


def _measure(target: "Target", levels: "list[Level]", given: Item) -> tuple[Item, bool]:
    """Run all levels; return the result and whether Ctrl-C ended it."""
    import asyncio

    import uvloop

    asks = _asks(given)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures, used, is_stopped = runner.run(_run(target, levels, asks, given["seed"]))
    from modelyard import __version__
    from modelyard.clock import SystemClock

    source = (
        str(given["dataset"])
        if given["dataset"]
        else f"{given['input_tokens']} tokens in"
        if given["route"] == "embeddings"
        else f"{given['input_tokens']} tokens in, {given['output_tokens']} out"
    )
    workload = {
        "title": source,
        **{
            name: given[name] for name in ("input_tokens", "output_tokens", "prefix_share", "route", "seed", "arrivals")
        },
        "dataset": str(given["dataset"] or ""),
        "is_streamed": used.is_streamed,
        "ignores_eos": used.ignores_eos,
    }
    return {
        "object": "modelyard.bench",
        "version": __version__,
        "date": int(SystemClock.unix_s()),
        "model": target.model,
        "url": target.url,
        "workload": workload,
        "levels": figures,
    }, is_stopped


def _asks(given: Item) -> "Iterator[Ask]":
    from modelyard.domain.lengths import lengths_of
    from modelyard.loadtest.workload import Made, asks_of, asks_of_file

    context = click.get_current_context()
    is_length_given = context.get_parameter_source("output_tokens") is click.core.ParameterSource.COMMANDLINE
    try:
        outputs = lengths_of(given["output_tokens"])
        if given["dataset"] is not None:
            own = outputs if is_length_given else None
            return asks_of_file(given["dataset"], given["route"], own, seed=given["seed"])()
        made = Made(lengths_of(given["input_tokens"]), outputs, given["prefix_share"])
        return asks_of(made, given["route"], seed=given["seed"])
    except ValueError as error:
        raise Failure(f"{error}.", Exit.USAGE) from error
    except OSError as error:
        raise Failure(f"Cannot read {given['dataset']}: {error.strerror}.", Exit.NOT_FOUND) from error


async def _run(
    target: "Target", levels: "list[Level]", asks: "Iterator[Ask]", seed: int
) -> "tuple[list[Item], Target, bool]":
    import asyncio
    import signal

    from modelyard.loadtest.client import Client, settle
    from modelyard.loadtest.driver import PROGRESS_S, Driver
    from modelyard.loadtest.statistics import figures_of

    line, found, is_stopped = ProgressLine(), [], False
    async with Client(target) as client:
        _check(target, await settle(client, next(asks)))
        driver = Driver(client, asks, seed=seed, progress_s=PROGRESS_S if is_terminal() else _PIPE_S)
        # The first Ctrl-C ends the measurement, the second one everything.
        loop = asyncio.get_running_loop()

        def stop() -> None:
            driver.stop()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            for number, level in enumerate(levels, 1):
                measured = await driver.run(level, partial(_show, line, f"{number}/{len(levels)}"))
                found.append(figures_of(measured))
                if measured.is_stopped:
                    is_stopped = True
                    break
        finally:
            line.clear()
            loop.remove_signal_handler(signal.SIGINT)
    return found, client.target, is_stopped


def _check(target: "Target", first: Any) -> None:
    """Refuse to measure what answers nobody; other failures are among those that are counted."""
    code = next((code for status, code in _REFUSALS.items() if first.error.startswith(status)), None)
    if code is None:
        return
    told = f": {first.detail}" if first.detail else ""
    hint = _close_models(target) if code is Exit.NOT_FOUND else ""
    raise Failure(
        f"{target.url} does not answer a request for '{target.model}' ({first.error}{told.rstrip('.')}).{hint}", code
    )


def _close_models(target: "Target") -> str:
    """Return which model of the server may be meant, "" where it does not tell."""
    try:
        models = Platform(target.url, target.key, target.certificate).get("/v1/models")
        names = [str(one["id"]) for one in models["data"]]
    except (Failure, KeyError, TypeError):
        return ""  # any server may be measured, and not every one lists its models as OpenAI does
    return f" {close_names(target.model, names)}" if names else ""


_REFUSALS = {
    "no connection": Exit.UNAVAILABLE,
    "HTTP 401": Exit.AUTH,
    "HTTP 403": Exit.AUTH,
    "HTTP 404": Exit.NOT_FOUND,
}


def _show(line: ProgressLine, place: str, now: "Measured") -> None:
    import time

    passed_s = max(time.perf_counter() - now.begun_s, 1e-9)
    failed = sum(bool(one.error) for one in now.samples)
    tokens = sum(one.output_tokens for one in now.samples)
    whole = f"{now.level.requests} requests" if now.level.requests else f"{now.level.duration_s:.0f} s"
    text = f"{place}  {now.level.name}  {passed_s:.0f} s of {whole}  {len(now.samples)} done, {now.in_flight} open"
    line.show(f"{text}  {tokens / passed_s:.0f} tok/s" + (f"  {failed} failed" if failed else ""))


def _json(value: Item) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise Failure(f"Cannot write {file}: {error.strerror}.") from error


def _read(file: Path) -> Item:
    import msgspec

    try:
        value = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}.", Exit.NOT_FOUND) from error
    except msgspec.DecodeError as error:
        raise Failure(f"{file} is not valid JSON: {error}.", Exit.USAGE) from error
    if not isinstance(value, dict) or value.get("object") != "modelyard.bench":
        raise Failure(f"{file} is no result of 'modelyard bench --output'.", Exit.USAGE)
    return value
