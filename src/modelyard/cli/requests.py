"""``modelyard requests``: requests that nobody waits for (``Prefer: respond-async``)."""

import click

from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import Item, age, formats, listing, moment, show_json, show_list, show_pairs

_EXAMPLE = """\b
Example:
  modelyard requests
  modelyard requests req_7hq2m4xkd9vwa3cn00000001
  modelyard requests cancel req_7hq2m4xkd9vwa3cn00000001"""


@click.group("requests", cls=NounGroup, epilog=_EXAMPLE, short_help="List, show or cancel detached requests.")
def command() -> None:
    """List, show or cancel requests that nobody waits for; without a verb: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard requests list --last 100 --json")
@click.option("--last", type=click.IntRange(1, PAGE), default=20, show_default=True, help="How many of the newest.")
@connected
@listing
def list_requests(*, platform: Platform, last: int, is_json: bool, is_quiet: bool) -> None:
    """List the newest requests."""
    columns = {
        "ID": lambda request: request["id"],
        "MODEL": lambda request: request["model"],
        "STATUS": lambda request: request["status"],
        "WEBHOOK": lambda request: (request["webhook"] or {}).get("status"),
        "AGE": lambda request: age(request["created_at"]),
    }
    requests = platform.get("/v1/requests", limit=last)["data"]
    show_list(requests, columns, is_json=is_json, is_quiet=is_quiet, empty="No detached requests.")


@command.command("show", epilog="\b\nExample:\n  modelyard requests show req_7hq2m4xkd9vwa3cn00000001 --json")
@click.argument("request_id")
@connected
@formats("Print only its status.")
def show(request_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a request; its answer with --json."""
    _show(platform.get(f"/v1/requests/{segment(request_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("cancel", epilog="\b\nExample:\n  modelyard requests cancel req_7hq2m4xkd9vwa3cn00000001")
@click.argument("request_id")
@connected
@formats("Print only its status.")
def cancel(request_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Cancel a request, or forget it if it is over."""
    _show(platform.delete(f"/v1/requests/{segment(request_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command("replay", epilog="\b\nExample:\n  modelyard requests replay req_7hq2m4xkd9vwa3cn00000001")
@click.argument("request_id")
@connected
@formats("Print only its status.")
def replay(request_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Send the webhook of a request again."""
    path = f"/v1/requests/{segment(request_id)}/webhook/replay"
    _show(platform.post(path, {}), is_json=is_json, is_quiet=is_quiet)


def _show(request: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(request)
    elif is_quiet:
        print(request["status"])
    else:
        show_pairs(
            {
                "ID": request["id"],
                "Model": request["model"],
                "Route": request["route"],
                "Status": request["status"],
                "Created": moment(request["created_at"]),
                "Finished": moment(request["finished_at"]),
                "Kept until": moment(request["expires_at"]),
                "Answer": _answer_text(request),
                "Webhook": _webhook_text(request["webhook"]),
            }
        )


def _answer_text(request: Item) -> str:
    if request["response"]:
        return f"HTTP {request['response']['status_code']}, {request['response']['content_type']}"
    return f"{request['error']['code']}: {request['error']['message']}" if request["error"] else "-"


def _webhook_text(webhook: Item | None) -> str:
    if webhook is None:
        return "-"
    text = f"{webhook['url']}: {webhook['status']} after {webhook['tries']} tries"
    if webhook["attempts"]:
        last = webhook["attempts"][-1]
        text += f", last: {last['status_code'] or last['error']}"
    return text
