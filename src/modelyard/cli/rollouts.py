"""``modelyard canary``, ``rollback`` and ``rollout``: from one version to the next, and back."""

import time
from typing import Any

import click

from modelyard.cli.deploy import version_body
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import Platform, ask_of, connected, segment
from modelyard.cli.nouns import DURATION
from modelyard.cli.output import Item, ProgressLine, formats, moment, show_json, show_pairs, show_table

_POLL_S = 0.5
_END = {"promoted", "rolled_back"}

_formats = formats("Print only the endpoint's id.")


@click.group(
    "canary",
    epilog="\b\nExample:\n  modelyard canary set demo 10 ./demo-v2.gguf\n  modelyard rollout status demo --watch\n"
    "  modelyard canary promote demo",
    short_help="Try a new version on a part of the traffic.",
)
def canary() -> None:
    """Try a new version on a part of the requests.

    It goes on by itself while it is as good as the one before, and back when it is not.
    """


@canary.command(
    "set",
    epilog="\b\nExample:\n  modelyard canary set demo 10 ./demo-v2.gguf --version v2\n"
    "  modelyard canary set demo 10 --version v2 --step-time 10m --requests 500\n  modelyard canary set demo 25",
    short_help="Begin a canary, or move the one that runs to another share.",
)
@click.argument("name")
@click.argument("percent", type=click.IntRange(1, 100))
@click.argument("source", metavar="[PATH|URI]", required=False)
@click.option("--version", help="A version that exists; with PATH, the name of the new one. [default: the next]")
@click.option("--engine", help="Of a new version. [default: by the file's content]")
@click.option("--option", "options", multiple=True, metavar="K=V", help="A setting of a new version; repeatable.")
@click.option("--manual", "is_manual", is_flag=True, help="Wait for 'canary promote' at every step.")
@click.option("--step-time", "step_s", type=DURATION, help="Shortest time of a step. [default: 5m]")
@click.option("--requests", type=click.IntRange(1), help="Fewest requests to it in a step. [default: 100]")
@click.option("--keep", "keep_s", type=DURATION, help="How long the previous version is kept. [default: 10m]")
@connected
@_formats
def set_canary(
    name: str, *, platform: Platform, percent: int, is_json: bool, is_quiet: bool, version: str | None, **given: Any
) -> None:
    """Give a version PERCENT of the requests to the endpoint NAME: a new one from PATH, or one that exists.

    It gets them as soon as its replicas are ready. The other version keeps all of its own.
    """
    body = canary_body(percent, version, **given)
    path = f"/v1/endpoints/{segment(name)}/canary"
    endpoint = ask_of(platform, name, lambda path: platform.post(path, body), path)
    _show(endpoint, is_json=is_json, is_quiet=is_quiet)


@canary.command("promote", epilog="\b\nExample:\n  modelyard canary promote demo")
@click.argument("name")
@connected
@_formats
def promote(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Give the canary of the endpoint NAME all traffic, as soon as it has the replicas for it."""
    _act(platform, name, "promote", is_json=is_json, is_quiet=is_quiet)


@canary.command("pause", epilog="\b\nExample:\n  modelyard canary pause demo")
@click.argument("name")
@connected
@_formats
def pause(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Keep the rollout of the endpoint NAME at its step; nobody judges it."""
    _act(platform, name, "pause", is_json=is_json, is_quiet=is_quiet)


@canary.command("resume", epilog="\b\nExample:\n  modelyard canary resume demo")
@click.argument("name")
@connected
@_formats
def resume(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Let the paused rollout of the endpoint NAME go on; its step begins anew."""
    _act(platform, name, "resume", is_json=is_json, is_quiet=is_quiet)


@click.command(
    "rollback",
    epilog="\b\nExample:\n  modelyard rollback demo",
    short_help="Give the previous version all traffic again.",
)
@click.argument("name")
@connected
@_formats
def rollback(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Give the version that served the endpoint NAME before all traffic again; running requests are finished.

    While it is kept (10 minutes after a promotion), that takes less than a second.
    """
    _act(platform, name, "rollback", is_json=is_json, is_quiet=is_quiet)


@click.group(
    "rollout",
    epilog="\b\nExample:\n  modelyard rollout status demo --watch\n  modelyard rollout undo demo",
    short_help="Show, pause, resume or undo a change of versions.",
)
def rollout() -> None:
    """Show, pause, resume or undo the change from one version of an endpoint to the next."""


rollout.add_command(pause)
rollout.add_command(resume)


@rollout.command("undo", epilog="\b\nExample:\n  modelyard rollout undo demo")
@click.argument("name")
@connected
@_formats
def undo(name: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Give the version that served the endpoint NAME before all traffic again, as 'modelyard rollback' does."""
    _act(platform, name, "rollback", is_json=is_json, is_quiet=is_quiet)


@rollout.command(
    "status", epilog="\b\nExample:\n  modelyard rollout status demo\n  modelyard rollout status demo --watch"
)
@click.argument("name")
@click.option("--watch", "is_watching", is_flag=True, help="Stay until it is over; exit with 1 if it was rolled back.")
@connected
@formats("Print only its state.")
def status(name: str, *, platform: Platform, is_watching: bool, is_json: bool, is_quiet: bool) -> None:
    """Show how far the rollout of the endpoint NAME is, and what the judge says."""
    path = f"/v1/endpoints/{segment(name)}/rollout"
    found: Item = ask_of(platform, name, platform.get, path)
    if is_watching:
        found = _watch(platform, path, found)
    if is_json:
        show_json(found)
    elif is_quiet:
        print(found["state"])
    else:
        _show_status(name, found)
    if is_watching and found["state"] == "rolled_back":
        raise Failure(f"The rollout of '{name}' was rolled back: {found['reason']}.", Exit.FAILURE)


for _same in (status, rollback):
    canary.add_command(_same)  # where somebody who began one with 'canary set' looks for them


def canary_body(percent: int, version: str | None, **given: Any) -> Item:
    """Return the body of ``POST /v1/endpoints/{endpoint}/canary`` for a command line."""
    body: Item = {"weight": percent}
    source, engine, options = given["source"], given["engine"], given["options"]
    if source is not None or engine is not None or options:
        body |= version_body(source=source, engine=engine, options=options, version=version)
    elif version is not None:
        body["version"] = version
    if given["is_manual"]:
        body["mode"] = "manual"
    auto = {"step_seconds": given["step_s"], "min_requests": given["requests"]}
    if auto := {name: value for name, value in auto.items() if value is not None}:
        body["auto"] = auto
    if given["keep_s"] is not None:
        body["keep_previous_seconds"] = given["keep_s"]
    return body


def rollout_text(found: Item) -> str:
    """Return in one line how far a rollout is."""
    text = f"{found['stable']} -> {found['candidate']}: {found['state'].replace('_', ' ')}"
    if found["state"] == "rolled_back":
        return text
    text += f" at {found['weight']} %"
    if found["kind"] == "rolling":
        return f"{text}, replica by replica"
    return f"{text}, on the way to {found['target']} %" if found["weight"] < found["target"] else text


def _act(platform: Platform, name: str, verb: str, *, is_json: bool, is_quiet: bool) -> None:
    path = f"/v1/endpoints/{segment(name)}/{verb}"
    endpoint = ask_of(platform, name, lambda path: platform.post(path, {}), path)
    _show(endpoint, is_json=is_json, is_quiet=is_quiet)


def _show(endpoint: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(endpoint)
    elif is_quiet:
        print(endpoint["id"])
    else:
        name = endpoint["name"]
        print(f"'{name}' {rollout_text(endpoint['rollout'])}. See: modelyard rollout status {name} --watch")


def _watch(platform: Platform, path: str, found: Item) -> Item:
    progress = ProgressLine()
    try:
        while found["state"] not in _END:
            progress.show(f"{rollout_text(found)}: {found['reason'] or 'not judged yet'}")
            time.sleep(_POLL_S)
            found = platform.get(path)
    finally:
        progress.clear()
    return found


def _show_status(name: str, found: Item) -> None:
    steps = ", ".join(
        f"[{step} %]" if at == found["step"] else f"{step} %" for at, step in enumerate(found["steps"], start=1)
    )
    show_pairs(
        {
            "Endpoint": name,
            "Rollout": rollout_text(found),
            "Why": found["reason"],
            "Mode": found["mode"],
            "Steps": steps if found["kind"] == "canary" else "",
            "Began": moment(found["began_at"]),
            "Ended": moment(found["ended_at"]) if found["ended_at"] else "",
            "Kept": f"{found['stable']} until {moment(found['kept_until'])}" if found["kept_until"] else "",
        }
    )
    if judgements := found["judgements"]:
        print()
        rows = [(moment(one["at"]), f"{one['weight']} %", one["verdict"], one["reason"]) for one in judgements]
        show_table(["WHEN", "AT", "VERDICT", "REASON"], rows)
