"""``modelyard fit``: which precision and accelerators fit a model, how fast, at what price, and what to take."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import PAGE, Platform, close_names, connectable
from modelyard.cli.output import Item, remark, show_json, show_pairs, show_table

if TYPE_CHECKING:
    from modelyard.domain.facts import ModelFacts
    from modelyard.policy.hardware import Offer

_GIB = 1024**3
_SHOWN = 12
_CONTEXT = 4096
_OF_ANSWERS = ("TOK/S", "ITL MS", "BOUND", "$/1M OUT")
_WEIGHTS = (".gguf", ".safetensors", ".onnx")
_FILES = (*_WEIGHTS, ".json")
_PURPOSES = ("general", "math", "code-exact", "embeddings", "reproducible")


@click.command(
    "fit",
    epilog="\b\nExample:\n  modelyard fit ./model.gguf\n  modelyard fit ./llama/config.json --gpu h100\n"
    "  modelyard fit demo@v1 --context 16384 --itl-ms 40 --fleet",
    short_help="Say what fits a model: precision, accelerators, speed, price.",
)
@click.argument("model", metavar="MODEL")
@click.option("--gpu", "gpus", multiple=True, metavar="KIND", help="Only this kind, like h100 or cpu; repeatable.")
@click.option(
    "--context",
    type=click.IntRange(2),
    default=None,
    help="Tokens of a request. [default: 4096, or the model's own if shorter]",
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=256, show_default=True, help="Those of them that are the answer."
)
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True, help="Requests at once.")
@click.option("--itl-ms", type=click.FloatRange(0), default=0.0, help="Longest mean time between two tokens.")
@click.option("--ttft-ms", type=click.FloatRange(0), default=0.0, help="Longest time to the first token.")
@click.option("--purpose", type=click.Choice(_PURPOSES), default="general", help="What forbids to quantise.")
@click.option("--fleet", "fleet_only", is_flag=True, help="Only accelerators that the platform has.")
@click.option("--all", "is_all", is_flag=True, help="Every combination, also those that do not fit.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@connectable
def command(model: str, *, find: Callable[[], Platform], is_all: bool, is_json: bool, **given: Any) -> None:
    """Say in which precision and on which accelerators MODEL fits, how fast it is expected to be and what it costs.

    MODEL is a file or folder of this machine, the config.json of a Hugging Face model that is not here, or
    NAME@VERSION, or the URI of one, in the registry. Speeds are a roofline from data sheets, not measured.

    With a platform its accelerators and prices count; a file needs none.
    """
    body = {"gpu": [kind.lower() for kind in given.pop("gpus")], **given, "context": given["context"] or 0}
    if body["output_tokens"] >= (body["context"] or _CONTEXT):
        raise click.UsageError("--output-tokens are a part of --context: give fewer, or a longer context.")
    path = Path(model).expanduser()
    if path.exists():
        answer = _of_file(path, body, find)
    elif model.startswith((".", "/", "~")) or model.endswith(_FILES):
        raise Failure(f"There is no file '{model}'.", Exit.NOT_FOUND)
    else:
        answer = _of_registry(model, body, find())
    if is_json:
        show_json(answer)
    else:
        _show(answer, is_all=is_all)


def _of_registry(model: str, body: Item, platform: Platform) -> Item:
    try:
        answer: Item = platform.post("/v1/models/fit", {**body, "model": model})
    except Refused as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        names = {version["name"] for version in platform.all("/v1/registry/models", limit=PAGE)}
        raise error.with_hint(close_names(model, sorted(names))) from error
    return answer


def _of_file(path: Path, body: Item, find: Callable[[], Platform]) -> Item:
    """Return what the platform advises, or, where none runs, what is known without one."""
    from msgspec import to_builtins

    facts = facts_of_path(path)
    if not (facts.parameters or facts.weights_bytes):
        raise Failure(f"{path} does not say how large its model is. Give the folder with its weights.")
    try:
        platform = find()
    except Failure as error:
        if error.exit_code is not Exit.UNAVAILABLE or body["fleet_only"]:
            raise
        return {**_alone(facts, body), "model": str(path)}
    answer: Item = platform.post("/v1/models/fit", {**body, "facts": to_builtins(facts)})
    return {**answer, "model": str(path)}


def facts_of_path(path: Path) -> "ModelFacts":
    """Return what a file, a folder or a configuration of this machine says of a model."""
    from modelyard.formats import ArtifactInvalidError

    try:
        if path.suffix == ".json" and path.is_file():
            from modelyard.formats.huggingface import CONFIG_BYTES_MAX, facts_from

            if path.stat().st_size > CONFIG_BYTES_MAX:
                raise Failure(f"{path} is no configuration: it has more than {CONFIG_BYTES_MAX:,} bytes.")
            return facts_from({"config.json": path.read_bytes()})
        from modelyard.cli.model_inspect import files_in
        from modelyard.formats.folder import facts_of

        files = files_in(path) if path.is_dir() else {path.name: path}
        if "config.json" in files and not any(name.endswith(_WEIGHTS) for name in files):
            return facts_of_path(files["config.json"])  # a model that is not here
        return facts_of(files)
    except ArtifactInvalidError as error:
        raise Failure(f"{path}: {error.code}: {error}") from error
    except OSError as error:
        raise Failure(f"Cannot read {error.filename or path}: {error.strerror}.") from error


def _alone(facts: "ModelFacts", body: Item) -> Item:
    """Advise without a platform: by the table of kinds and its prices, and this machine's memory for the CPU."""
    from msgspec import to_builtins

    from modelyard.policy.fit import Targets, advise, load_of, too_long
    from modelyard.policy.precisions import Purpose

    if told := too_long(facts, body["context"]):
        raise Failure(f"--context: {told}.", Exit.USAGE)
    load = load_of(facts, body["context"], body["output_tokens"], body["concurrency"])
    targets = Targets(body["itl_ms"], body["ttft_ms"])
    kinds = body["gpu"] or (["cpu"] if facts.format in ("onnx", "gguf") else [])
    advice = advise(facts, _offers(kinds), load, targets=targets, purpose=Purpose(body["purpose"]))
    return {
        "object": "model.fit",
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters or facts.parameters,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        **{name: getattr(load, name) for name in ("context", "output_tokens", "concurrency")},
        **to_builtins(advice),
    }


def _offers(kinds: list[str]) -> "list[Offer]":
    from modelyard.fleet.accelerators import Memory
    from modelyard.policy.hardware import CPU, KINDS, Offer, offers_of_table

    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise Failure(f"Nothing is known of '{unknown[0]}'. Known: {', '.join(sorted(KINDS))}.", Exit.USAGE)
    offers = [offer for offer in offers_of_table() if not kinds or offer.kind.name in kinds]
    if CPU in kinds:
        offers.append(Offer(KINDS[CPU], Memory().limit_bytes(), 1, 0))
    return offers


def _show(answer: Item, *, is_all: bool) -> None:
    rows: list[Item] = answer["rows"]
    shown = _ordered(rows) if is_all else best_rows(rows)[:_SHOWN]
    cache = answer["kv_bytes_per_token"]
    # Without a cache or a state it makes vectors or classes of texts, and no text.
    is_encoder = bool(rows) and not any(row["memory"]["kv_bytes"] for row in rows)
    load = f"{answer['concurrency']} at once, {answer['context']:,} tokens each"
    show_pairs(
        {
            "Model": answer["model"],
            "Parameters": _parameters(answer),
            "KV cache": f"{cache / 1024:,.4g} KiB a token" if cache else "none",
            "Load": load if is_encoder else f"{load}, {answer['output_tokens']:,} of them the answer",
        }
    )
    if shown:
        print()
        _show_table(shown, has_notes=is_all, is_encoder=is_encoder)
    print()
    take = answer["recommended"]
    if take is not None:
        print(f"Take {take['precision']} on {take['count']} x {take['kind']}: {answer['reason']}.")
        print(f"Quality: {take['quality']}.")
    else:
        print(f"No recommendation: {answer['reason']}.")
    for rule in answer["rules"]:
        print(rule)
    remark(
        "Speeds are a roofline from data sheets; measure with 'modelyard bench'. Prices: docs/how-to/choose-hardware.md"
    )
    if not is_all and len(shown) < len(rows):
        remark(f"{len(shown)} of {len(rows)} combinations; --all shows the others.")


def best_rows(rows: list[Item]) -> list[Item]:
    """Return of each precision and kind the cheapest that fits and meets what is asked, cheapest first."""
    best: dict[tuple[str, str], Item] = {}
    for row in _ordered(rows):
        if row["fits"] and row["meets_targets"] and row["is_allowed"]:
            best.setdefault((row["precision"], row["kind"]), row)
    return list(best.values())


def _ordered(rows: list[Item]) -> list[Item]:
    def place(row: Item) -> tuple[object, ...]:
        usable = row["fits"] and row["meets_targets"]
        return not row["fits"], not usable, row["is_tight"], row["usd_per_million_output"], row["count"]

    return sorted(rows, key=place)


def _show_table(rows: list[Item], *, has_notes: bool, is_encoder: bool) -> None:
    columns: dict[str, Callable[[Item], object]] = {
        "PRECISION": lambda row: row["precision"],
        "ENGINE": lambda row: row["engine"],
        "ON": lambda row: f"{row['count']} x {row['kind']}{'*' if row['is_in_fleet'] else ''}",
        "WEIGHTS": lambda row: _gib(row["memory"]["weights_bytes"]),
        "KV": lambda row: _gib(row["memory"]["kv_bytes"]),
        "REST": lambda row: _gib(row["memory"]["activations_bytes"] + row["memory"]["overhead_bytes"]),
        "USABLE": lambda row: _gib(row["memory"]["usable_bytes"]),
        "TOK/S": lambda row: f"{row['speed']['output_tokens_s']:.0f}",
        "ITL MS": lambda row: f"{row['speed']['itl_ms']:.1f}",
        "TTFT MS": lambda row: f"{row['speed']['ttft_ms']:.0f}",
        "BOUND": lambda row: row["speed"]["bound"],
        "$/H": lambda row: f"{row['usd_per_hour']:.2f}",
        "$/1M OUT": lambda row: f"{row['usd_per_million_output']:.2f}",
    }
    if is_encoder:  # what is told of an answer's tokens does not apply
        columns = {name: cell for name, cell in columns.items() if name not in _OF_ANSWERS}
    columns["NOTE" if has_notes else "QUALITY"] = lambda row: row["note"] or row["quality"]
    show_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])
    print(f"GiB of each accelerator{'; * the platform has it' if any(row['is_in_fleet'] for row in rows) else ''}")


def _parameters(answer: Item) -> str:
    every, active = answer["parameters"], answer["active_parameters"]
    text = f"{every / 1e9:.4g} B" if every else "not known"
    return f"{text}, of which {active / 1e9:.3g} B compute a token" if active < every else text


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f}"
