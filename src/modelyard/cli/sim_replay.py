"""``modelyard sim --replay``: the own ledger's traffic with other settings, hardware, prices or amounts."""

import asyncio
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import data_directory
from modelyard.cli.nouns import DURATION, WHEN
from modelyard.cli.output import moment, remark, show_json
from modelyard.cli.sim_output import Asked as Forms
from modelyard.cli.sim_output import Progress, show, write
from modelyard.clock import SystemClock

if TYPE_CHECKING:
    from modelyard.cli.sim_ledger import Case, Wanted
    from modelyard.domain.prices import PriceEntry
    from modelyard.sim.replay_setup import Change
    from modelyard.sim.results import Results

LIMIT = 200_000
"""Requests that are replayed without being asked: about half a minute a variant."""
SHOWN = 10
"""So many endpoints have tables of their own."""
LAST_S = 24 * 3600.0
_NANO = 1_000_000_000
_OPTIONS = (
    click.option("--from", "since", type=WHEN, metavar="WHEN", help="Replay from then on: 2h (ago), or a date."),
    click.option("--to", "until", type=WHEN, metavar="WHEN", help="Replay until then. [default: now]"),
    click.option("--last", "last_s", type=DURATION, metavar="TIME", help="Replay the last 24h, 7d … [default: 24h]"),
    click.option("--endpoint", "endpoints", multiple=True, metavar="NAME", help="Only this endpoint; repeatable."),
    click.option(
        "--usage",
        "usage_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Replay what 'usage export' wrote (CSV or JSON lines), without a database.",
    ),
    click.option("--runs-on", metavar="KIND", help="Accelerators of a replica now, like l4 or 2xh100; for --usage."),
    click.option("--sample", metavar="PERCENT", help="Replay 10% … of each hour."),
    click.option(
        "--limit", type=click.IntRange(1), default=LIMIT, show_default=True, help="Most requests to replay at once."
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="PATH=VALUE",
        help="Try a setting: scaling.max_replicas=4; repeatable.",
    ),
    click.option("--hardware", metavar="KIND", help="Try other accelerators, like h100."),
    click.option("--price", "prices", multiple=True, metavar="KIND=USD", help="Try a price of an accelerator hour."),
    click.option(
        "--token-price",
        "token_prices",
        multiple=True,
        metavar="PRICES",
        help="Try prices of requests: input=0.2,output=0.8 (of 1M tokens; request, unit), or MODEL:…; repeatable.",
    ),
    click.option("--traffic", metavar="FACTOR", help="Try so many times as many requests: x2, 0.5."),
    click.option(
        "--variants",
        "variants_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Try each [variant.NAME] of a TOML file.",
    ),
    click.option("--data-dir", metavar="DIR", help="Data directory of the platform [env: MODELYARD_DATA_DIR]."),
    click.option("--config", metavar="FILE", help="The settings file that 'modelyard up' has."),
)


def replay_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``--replay``; the command gives them to ``replay_ledger`` as they are."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


REPLAY_NAMES = (
    "since", "until", "last_s", "endpoints", "usage_file", "runs_on", "sample", "limit", "settings", "hardware",
    "prices", "token_prices", "traffic", "variants_file", "data_dir", "config",
)  # fmt: skip
"""What the options are called as parameters of a command."""


def replay_ledger(*, forms: Forms, seeds: int, **given: Any) -> None:
    """Replay what was recorded, and print it beside what is to be tried."""
    from modelyard.cli.sim_reach import check_reach
    from modelyard.sim.replay import total
    from modelyard.sim.replay_setup import SettingError

    changes = _changes(given)
    are_prices = bool(changes) and all(change.is_price_only for change in changes)
    if are_prices and (forms.html is not None or forms.pictures is not None):
        raise Failure("Where only prices change nothing happens over time: there is nothing to draw.", Exit.USAGE)
    forms.check()
    cases = _read(given)
    most = max((change.traffic for change in changes), default=1.0)
    if not are_prices and most * sum(len(case.ledger.asked) for case in cases) > given["limit"]:
        raise Failure(
            f"With --traffic x{most:g} these are more than {given['limit']:,} requests (--limit).", Exit.USAGE
        )
    check_reach(cases, changes)
    if forms.html is not None and len(cases) > 1:
        raise Failure("A page has room for one endpoint: name it with --endpoint.", Exit.USAGE)
    progress = Progress(len(cases) * (len(changes) + 1) * seeds)
    found: list[Results] = []
    reasons: dict[str, None] = {}
    try:
        for case in cases:
            try:
                tell = partial(_tell, progress, case.name if len(cases) > 1 else "")
                found.append(_one(case, changes, seeds, tell, are_prices=are_prices))
            except SettingError as error:
                reasons[str(error)] = None
    finally:
        progress.clear()
    if not found:
        raise Failure(f"This cannot be tried: {' '.join(reasons)}", Exit.USAGE)
    for why in reasons:
        remark(f"Left out: {why}")
    if len(found) > 1:
        found.append(total(found, title=f"{len(found)} endpoints together"))
    _show(found, forms)


def _tell(progress: Progress, endpoint: str, name: str, seed: int, share: float) -> None:
    """Tell how far a run is; those of another endpoint are others."""
    progress(f"{endpoint}, {name}" if endpoint else name, seed, share)


def _one(
    case: "Case",
    changes: Sequence["Change"],
    seeds: int,
    progress: Callable[[str, int, float], None],
    *,
    are_prices: bool,
) -> "Results":
    """Return what one world comes to."""
    from modelyard.cli.sim_speeds import setup_of
    from modelyard.sim.replay import recorded_only, replay

    title = f"replay of {case.name}, {_span(case)}"
    if are_prices:
        return recorded_only(case.ledger, changes, title=title, notes=case.notes)
    setup, notes = setup_of(case)
    return replay(
        setup,
        case.ledger,
        changes,
        seeds=range(1, seeds + 1),
        title=title,
        notes=(*case.notes, *notes),
        progress=progress,
    )


def _show(found: Sequence["Results"], forms: Forms) -> None:
    *alone, last = found
    if forms.is_json:
        show_json(found)
    elif forms.is_quiet:
        show(last, msgspec.structs.replace(forms, html=None, pictures=None))
    elif len(alone) > SHOWN:
        remark(f"The {SHOWN} endpoints with the most requests, and all together; --json has the others.")
    for number, results in enumerate([*alone[:SHOWN], last], 1):
        is_sum = results is last and bool(alone)
        # All together have nothing over time to draw.
        pictures = None if is_sum or forms.pictures is None else forms.pictures / (f"{number}" if alone else "")
        its = msgspec.structs.replace(forms, pictures=pictures)
        if forms.is_json or forms.is_quiet:
            write(results, its)
            continue
        if number > 1:
            print()
        show(results, its)


# --- what to read --------------------------------------------------------------------------


def _read(given: Mapping[str, Any]) -> list["Case"]:
    from modelyard.cli import sim_ledger, sim_usage_file
    from modelyard.config import load

    file = given["usage_file"]
    if file is not None:
        since, until = _window(given, *sim_usage_file.span_of(file))
    else:
        now = SystemClock.unix_s()
        since, until = _window(given, None, now)
    wanted = _wanted(given, since, until)
    if file is not None:
        cases = sim_usage_file.read_file(file, wanted)
    else:
        config = load(Path(given["config"]) if given["config"] else None, os.environ)
        cases = asyncio.run(sim_ledger.read_stores(config, data_directory(given["data_dir"]), wanted))
    cases = [case for case in cases if case.ledger.requests or case.ledger.asked]
    if not cases:
        raise Failure(f"There are no requests from {moment(since)} to {moment(until)}.", Exit.NOT_FOUND)
    number = sum(len(case.ledger.asked) for case in cases)
    remark(f"{number:,} requests of {len(cases)} endpoint{'s' if len(cases) > 1 else ''}.")
    return cases


def _window(given: Mapping[str, Any], first: float | None, last: float) -> tuple[float, float]:
    """Return the time to replay; a file's own where nothing else is said."""
    if given["last_s"] is not None and given["since"] is not None:
        raise click.UsageError("Give --from or --last, not both.")
    # A moment after the last row: ends are not in.
    until = given["until"] if given["until"] is not None else last + (1e-3 if first is not None else 0.0)
    if given["since"] is not None:
        since = given["since"]
    elif given["last_s"] is not None:
        since = until - given["last_s"]
    else:
        since = first if first is not None else until - LAST_S
    if since >= until:
        raise click.UsageError("The time to replay ends before it begins: see --from and --to.")
    return since, until


def _wanted(given: Mapping[str, Any], since: float, until: float) -> "Wanted":
    from modelyard.cli.sim_ledger import Wanted
    from modelyard.sim.recorded import stretches

    share = _percent(given["sample"]) if given["sample"] else 1.0
    kind, count = _hardware(given["runs_on"]) if given["runs_on"] else ("", 1.0)
    return Wanted(
        names=tuple(given["endpoints"]),
        replayed=tuple(stretches(since, until, share)),
        limit=given["limit"],
        kind=kind,
        accelerators=count,
    )


def _hardware(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"(?:([1-9]\d*) ?x ?)?([a-z][a-z0-9]*)", text.strip().lower())
    if match is None:
        raise click.UsageError(f"'{text}' is no hardware; write --runs-on h100 or 2xh100.")
    return match[2], float(match[1] or 1)


def _percent(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", text)
    if match is None or not 0 < float(match[1]) <= 100:
        raise click.UsageError(f"'{text}' is no part; write --sample 10%.")
    return float(match[1]) / 100


def _span(case: "Case") -> str:
    replayed = case.ledger.replayed
    text = f"{moment(replayed[0].since)} to {moment(replayed[-1].until)}"
    hours = sum(one.until - one.since for one in replayed) / 3600
    return text if len(replayed) == 1 else f"{text}, {hours:.3g} hours of it"


# --- what to try ---------------------------------------------------------------------------


class _Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ``[variant.NAME]``."""

    set: dict[str, Any] = {}
    hardware: str = ""
    price: dict[str, float] = {}
    token_price: dict[str, dict[str, float]] = {}
    traffic: float | str = 1.0


class _Variants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    variant: dict[str, _Tried]


def _changes(given: Mapping[str, Any]) -> list["Change"]:
    from modelyard.sim.replay_setup import Change

    changes = [] if given["variants_file"] is None else _of_file(given["variants_file"])
    own = Change(
        name="changed",
        settings=dict(_pair(text, "--set scaling.max_replicas=4") for text in given["settings"]),
        hardware=(given["hardware"] or "").lower(),
        prices={kind.lower(): _usd(usd) for kind, usd in (_pair(one, "--price h100=2.5") for one in given["prices"])},
        token_prices=tuple(entry for text in given["token_prices"] for entry in _token_prices(text)),
        traffic=_factor(given["traffic"]) if given["traffic"] else 1.0,
    )
    if own != Change(name="changed"):
        changes.append(own)
    taken = {"as is", "recorded"}
    for change in changes:
        if change.name in taken:
            raise click.UsageError(f"A variant cannot be called '{change.name}': something else in the table is.")
        taken.add(change.name)
        subjects = [entry.subject for entry in change.token_prices]
        if len(set(subjects)) < len(subjects):
            raise click.UsageError("A model is priced twice; write all of its prices in one: input=0.2,output=0.8.")
    return changes


def _of_file(file: Path) -> list["Change"]:
    from modelyard.sim.replay_setup import Change

    try:
        read = msgspec.convert(tomllib.loads(file.read_text("utf-8")), _Variants)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Failure(f"{file}: {error}.", Exit.USAGE) from error
    except RecursionError as error:
        raise Failure(f"{file}: it is nested too deeply.", Exit.USAGE) from error
    return [
        Change(
            name=name,
            settings={path: _text(value) for path, value in _flat(one.set)},
            hardware=one.hardware.lower(),
            prices={kind.lower(): _usd(str(usd)) for kind, usd in one.price.items()},
            token_prices=tuple(_entries({model: dict(its) for model, its in one.token_price.items()})),
            traffic=_factor(str(one.traffic)),
        )
        for name, one in read.variant.items()
    ]


def _flat(given: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Return settings by their paths, whether they are written as paths or as tables."""
    found: list[tuple[str, Any]] = []
    for name, value in given.items():
        path = f"{before}{name}"
        found += _flat(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pair(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise click.UsageError(f"'{text}' is no setting; write {example}.")
    return name.strip(), value.strip()


def _usd(text: str) -> int:
    from modelyard.metering.prices import exact_nano

    found = exact_nano(text)
    if found is None:
        raise click.UsageError(f"'{text}' is no amount; write --price h100=2.5.")
    return found


def _token_prices(text: str) -> list["PriceEntry"]:
    model, colon, rest = text.rpartition(":")
    pairs = dict(_pair(one, "--token-price input=0.2,output=0.8") for one in rest.split(","))
    return _entries({model if colon else "*": pairs})


def _entries(given: Mapping[str, Mapping[str, object]]) -> list["PriceEntry"]:
    from modelyard.config.billing import PriceConfig
    from modelyard.errors import StartupError
    from modelyard.metering.prices import configured

    try:
        return configured(msgspec.convert(given, dict[str, PriceConfig], strict=False))
    except (msgspec.ValidationError, StartupError) as error:
        raise click.UsageError(f"--token-price: {error}. Write --token-price input=0.2,output=0.8.") from error


def _factor(text: str) -> float:
    match = re.fullmatch(r"x?(\d+(?:\.\d+)?)", text.strip().lower())
    if match is None or not 0 < float(match[1]) <= 1000:
        raise click.UsageError(f"'{text}' is no factor; write --traffic x2 or 0.5.")
    return float(match[1])
