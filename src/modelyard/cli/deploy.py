"""``modelyard deploy``: from a file to an endpoint, with every stage in sight."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import click

from modelyard.cli.applying import Applied, apply
from modelyard.cli.autoscale import autoscale_options
from modelyard.cli.bars import StageBar
from modelyard.cli.endpoint_file import FaultyFile, read_endpoint_file, with_lines
from modelyard.cli.engine_choice import ELSEWHERE, engine_for, one_of
from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import Platform, connected, segment
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, clean, listing, remark, show_json
from modelyard.cli.plan import show_plan
from modelyard.cli.sending import send_order
from modelyard.cli.serving import serving_options
from modelyard.clock import SystemClock

_POLL_S = 0.2
_SAID_MAX = 400
REGISTERED = "model:"
_CHAT = "/v1/chat/completions"
_EXTENSIONS = (".gguf", ".safetensors", ".onnx", ".bin", ".zip")
_EXAMPLE = """\b
Example:
  modelyard deploy ./smollm2.gguf --name smollm2 --wait
  modelyard deploy ./smollm2.gguf --scale 0..4 --idle 5m --option context_length=4096
  modelyard deploy hf://org/name/model-q4.gguf --wait
  modelyard deploy ./adapter-folder --base llama@v1 --name my-bot --wait
  modelyard deploy ./classifier.onnx --on minilm --name mood --wait
  modelyard deploy --engine simulated --name sim
  modelyard deploy -f endpoint.toml --wait"""


class Scale(click.ParamType[tuple[int, int]]):
    """Replicas: ``2``, or bounds like ``0..4``."""

    name = "replicas"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the fewest and the most."""
        match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", str(value))
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if most < max(1, least):
            self.fail(f"'{value}' is no scale; write 2, or bounds like 0..4.", param, ctx)
        return least, most


@click.command("deploy", epilog=_EXAMPLE, short_help="Deploy a model and get an endpoint.")
@click.argument("source", metavar="[PATH|URI]", required=False)
@click.option("--name", help="What callers put into 'model'. [default: the file's name]")
@click.option("--engine", help=f"{one_of()}. [default: by the content, of GGUF and ONNX]")
@click.option("--scale", type=Scale(), default="1", show_default=True, help="Replicas: 2, or bounds like 0..4.")
@click.option("--idle", "idle_s", type=DURATION, help="Quiet time before 0 replicas. [default: learned, 5m until then]")
@click.option("--option", "options", multiple=True, metavar="K=V", help="A setting of the engine; repeatable.")
@click.option("--version", help="Name of this version. [default: the next of v1, v2, …]")
@click.option("--base", metavar="NAME@VERSION", help="What the adapter at PATH is loaded onto.")
@click.option(
    "--on",
    "host",
    metavar="ENDPOINT",
    help="Endpoint on whose replicas it sits. [default: of an adapter, one of its base]",
)
@click.option("--shared", is_flag=True, help="Let every tenant call it (admin only).")
@click.option(
    "-f", "--file", "endpoint_file", type=click.Path(path_type=Path), help="An endpoint in TOML or JSON, in one file."
)
@click.option("--upload", "is_uploading", is_flag=True, help="Send the file at PATH, also to a platform that is here.")
@click.option("--wait", "is_waiting", is_flag=True, help="Return when it is ready; the stages go to stderr.")
@click.option("--timeout", "timeout_s", type=DURATION, default="15m", show_default=True, help="Longest --wait.")
@click.option("--print", "is_printing", is_flag=True, help="Print the request, send nothing.")
@click.option(
    "--dry-run", is_flag=True, help="Say what it would need, where it would run, what it would cost; do nothing."
)
@serving_options
@autoscale_options
@connected
@listing
def command(*, platform: Platform, serving: Item, autoscale: Item, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Deploy the model at PATH or URI and print its endpoint.

    A platform on this machine reads PATH itself; to one that is not, the file is uploaded first.

    With -f the endpoint is made as its file says, or changed to that; the same file twice changes nothing.
    """
    is_waiting, timeout_s, is_dry = (given.pop(name) for name in ("is_waiting", "timeout_s", "dry_run"))
    is_printing = given.pop("is_printing")
    endpoint_file, is_uploading = given.pop("endpoint_file"), given.pop("is_uploading")
    try:
        body, file, lines = _read(endpoint_file, given, serving=serving, autoscale=autoscale)
    except FaultyFile as error:
        assert endpoint_file is not None, "only a file has lines"
        raise _with_values(platform, error, endpoint_file) from error
    if is_printing:
        show_json(body)
        return
    if is_dry:
        show_plan(platform, body, is_json=is_json)
        return
    try:
        if endpoint_file is not None:
            done = apply(platform, body, file, is_uploading=is_uploading)
        else:
            done = _deploy(platform, body, file, is_uploading=is_uploading, is_next=given["version"] is None)
    except Refused as error:
        raise (with_lines(error, endpoint_file, lines) if endpoint_file is not None else error) from error
    answer = done.answer
    for warning in answer.get("warnings", ()):
        remark(f"Warning: {warning}.")
    routes: list[str] = []
    if is_waiting:
        ready = wait_until_ready(platform, done.endpoint_id, timeout_s=timeout_s)
        answer, routes = answer | {"status": ready["status"]}, ready.get("routes", [])
    if is_json:
        show_json(answer)
    elif is_quiet:
        print(done.endpoint_id)
    else:
        print(_outcome(body["model_name"], done, is_ready=is_waiting, routes=routes))


def _read(
    endpoint_file: Path | None, given: dict[str, Any], **sections: Item
) -> tuple[Item, Path | None, dict[str, int]]:
    """Return the request, the file of this machine that it names, and where the endpoint's file says what."""
    lines: dict[str, int] = {}
    if endpoint_file is not None:
        _refuse_options(click.get_current_context())
        body, lines = read_endpoint_file(endpoint_file)
    else:
        body = request_body(**given)
    file = local_file(body)
    if endpoint_file is not None:
        _complete(body, file)
    return body | {name: section for name, section in sections.items() if section}, file, lines


def _with_values(platform: Platform, error: FaultyFile, endpoint_file: Path) -> Failure:
    """Return a file's faults with those that only the platform finds: it is asked for a plan, which changes nothing."""
    # A file of this machine, and the engine that its content names, are not the platform's to judge.
    artifact = str(error.order.get("model_artifact") or "model:")
    is_local = artifact.startswith("file:") or not ELSEWHERE.match(artifact)
    untold = {"model_artifact"} | ({"framework"} - error.order.keys()) if is_local else set()
    try:
        platform.post("/v1/models/plan", error.order)
    except Refused as refused:
        return with_lines(refused, endpoint_file, error.lines, untold=untold) if refused.status == 400 else error
    except Failure:
        return error
    return error


def _deploy(platform: Platform, body: Item, file: Path | None, *, is_uploading: bool, is_next: bool) -> Applied:
    try:
        answer = send_order(
            platform, body, file, lambda order: platform.post("/v1/models/deploy", order), is_uploading=is_uploading
        )
    except Refused as error:
        if error.code != "conflict" or not is_next:
            raise
        raise error.with_hint(
            f"That is 'modelyard endpoints rm {body['model_name']}', 'endpoints add-release', or --name."
        ) from error
    return Applied(answer["endpoint_id"], ["deployed"], answer)


def _outcome(name: str, done: Applied, *, is_ready: bool, routes: Sequence[str]) -> str:
    if done.changes == ["deployed"]:
        if is_ready and routes and _CHAT not in routes:
            return f"'{name}' is ready. Routes: {', '.join(one.replace('{model}', name) for one in routes)}"
        if is_ready:
            return f"'{name}' is ready. Try: modelyard run {name} 'Hello'"
        ready = f"ready in about {done.answer['estimated_ready_seconds']} s"
        return f"Deploying '{name}' as {done.endpoint_id}; {ready}. See: modelyard endpoints {name}"
    what = "; ".join(done.changes) or "unchanged"
    return f"'{name}': {what}. See: modelyard endpoints {name}"


def _refuse_options(context: click.Context) -> None:
    """Refuse options of the command line that the file has the say in."""
    from click.core import ParameterSource

    with_file = {
        "endpoint_file",
        "is_uploading",
        "is_waiting",
        "timeout_s",
        "dry_run",
        "is_printing",
        "is_json",
        "is_quiet",
    }
    with_file |= {"url", "key", "data_dir"}
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in with_file and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = parameter.opts[0] if isinstance(parameter, click.Option) else "PATH"
            raise click.UsageError(f"With -f, write {option} into the file")


def _complete(body: Item, file: Path | None) -> None:
    """Fill in what a file may leave to the content of its artifact: the engine."""
    artifact = str(body.get("model_artifact", ""))
    if file is not None:
        body["model_artifact"] = file.as_uri()
    if not body.get("framework") and not body.get("base") and not artifact.startswith(REGISTERED):
        body["framework"] = engine_for(artifact, file)


def local_file(body: Item) -> Path | None:
    """Return the file of this machine that an order names.

    Raises:
        Failure: there is none of that name.
    """
    return _locate(str(body.get("model_artifact", "")) or None)[1]


def request_body(
    *,
    source: str | None,
    name: str | None,
    engine: str | None,
    scale: tuple[int, int],
    idle_s: float | None,
    options: tuple[str, ...],
    version: str | None,
    shared: bool,
    **guest: str | None,
) -> Item:
    """Return the body of ``POST /v1/models/deploy`` for a command line; ``guest``: its ``base``, its ``host``."""
    base, host = guest.get("base"), guest.get("host")
    least, most = scale
    if name is None:
        if source is None and engine is None and base is None:
            raise click.UsageError("PATH is missing; an engine without weights is --engine simulated --name NAME.")
        if source is None:
            raise click.UsageError("Give the model a --name.")
        if source.startswith(("upload:", REGISTERED)):
            raise click.UsageError("Give the endpoint a --name.")
        name = _name_of(source)
    body: Item = {
        "model_name": name,
        "hardware": {"min_replicas": least, "max_replicas": most},
        **version_body(source=source, engine=engine, options=options, version=version, base=base),
    }
    if host is not None:
        body["host"] = host
    if least == 0:
        body["scaling"] = {"scale_to_zero": True}
        if idle_s is not None:
            body["scaling"]["scale_to_zero_after_idle_seconds"] = idle_s
    if shared:
        body["shared"] = True
    return body


def version_body(
    *, source: str | None, engine: str | None, options: tuple[str, ...], version: str | None, base: str | None = None
) -> Item:
    """Return what a body says of a version: what a deployment and a further release have in common."""
    uri, file = _locate(source)
    body: Item = {"options": dict(_option(option) for option in options)}
    if base is not None:
        body["base"] = base
        if engine is not None:
            body["framework"] = engine
    elif engine is not None or not uri.startswith(REGISTERED):
        body["framework"] = engine_for(uri, file) if engine is None else engine
    elif not body["options"]:
        del body["options"]
    if uri:
        body["model_artifact"] = uri
    if version is not None:
        body["version"] = version
    return body


def wait_until_ready(platform: Platform, endpoint_id: str, *, timeout_s: float) -> Item:
    """Show an endpoint's stages until it is ready, and a new version has taken over from the last, and return it.

    Raises:
        Failure: it cannot start, or it took longer than ``timeout_s``.
    """
    clock = SystemClock()
    give_up_s = clock.monotonic_s() + timeout_s
    progress: StageBar | None = None
    was_rolling = False
    try:
        while True:
            endpoint: Item = platform.get(f"/v1/endpoints/{segment(endpoint_id)}")
            progress = progress or StageBar(endpoint["name"])
            if endpoint["status"] == "failed":
                progress.clear()
                reason = (endpoint.get("failure") or "no reason given").rstrip(".") + _last_words(endpoint)
                raise Failure(f"'{endpoint['name']}' cannot start: {reason}. See 'modelyard why {endpoint['name']}'.")
            rollout = endpoint.get("rollout") or {}
            is_rolling = rollout.get("kind") == "rolling" and rollout["state"] in ("running", "paused")
            if was_rolling and rollout.get("state") == "rolled_back":
                raise Failure(f"'{endpoint['name']}' serves {rollout['stable']} as before: {rollout['reason']}.")
            was_rolling = was_rolling or is_rolling
            if endpoint["status"] == "running" and not is_rolling:
                return endpoint
            progress.show(endpoint.get("progress"))
            if clock.monotonic_s() > give_up_s:
                raise Failure(
                    f"'{endpoint['name']}' is not ready after {timeout_s:.0f} s; it goes on. "
                    f"See 'modelyard endpoints {endpoint['name']}'.",
                    Exit.UNAVAILABLE,
                )
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        remark("Not waiting any longer; the deployment goes on.")
        raise
    finally:
        if progress is not None:
            progress.clear()


def _last_words(endpoint: Item) -> str:
    """Return the last line of the engine that failed last; what it ended with alone tells nobody why."""
    for event in reversed(endpoint.get("events") or []):
        lines = str(event.get("data", {}).get("last_lines") or "").strip().splitlines()
        if event.get("kind") == "replica_failed" and lines:
            return f'; it said: "{clean(lines[-1])[:_SAID_MAX]}"'
    return ""


def _locate(source: str | None) -> tuple[str, Path | None]:
    """Return the URI to send, and the file when it is one of this machine."""
    if source is None:
        return "", None
    if ELSEWHERE.match(source) and not source.startswith("file:"):
        return source, None
    path = _path_of(source) if source.startswith("file://") else source
    file = Path(path).expanduser().absolute()
    if not file.exists():
        raise Failure(f"There is no file {file}. Check the path.", Exit.NOT_FOUND)
    return file.as_uri(), file


def _path_of(uri: str) -> str:
    """Return the path of a ``file://`` URI, which may name this machine only: a file of another is not here."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        parts = None
    if parts is None or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        told = "a local file is file:///path, without a host, '?' and '#' (write %3F and %23)"
        raise Failure(f"{uri}: {told}.", Exit.USAGE)
    return unquote(parts.path)


def _name_of(source: str) -> str:
    """Return what to call a model by where it is: ``hf://org/name@main`` is 'name', ``…/smol.gguf?x=1`` is 'smol'."""
    place = source
    if ELSEWHERE.match(source):
        place = re.split(r"[?#]", source.removeprefix("pypi:"))[0].split("==")[0].rstrip("/")
        if source.startswith("hf://"):
            repo, _, rest = source.removeprefix("hf://").partition("@")
            place = rest if "/" in rest else repo
    name = Path(place).name
    stem = name.removesuffix(Path(name).suffix) if Path(name).suffix.lower() in _EXTENSIONS else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "model"


def _option(text: str) -> tuple[str, str | int | float | bool]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--option {text}: write NAME=VALUE.")
    if value in {"true", "false"}:
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
