"""``modelyard why``: the reason for what happened, in words and numbers."""

from collections.abc import Callable

import click

from modelyard.cli.http import Platform, connected, segment
from modelyard.cli.output import Item, clean, formats, show_json


@click.command(
    "why",
    epilog="\b\nExample:\n  modelyard why req_7hq2m4xkd9vwa3cn00000001\n"
    "  modelyard why req_7hq2m4xkd9vwa3cn00000001 --json",
    short_help="Say why a request went the way it went.",
)
@click.argument("reference", metavar="REQUEST_ID")
@connected
@formats("Print only what to do next.")
def command(reference: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Say why the request REQUEST_ID waited, went where it went, or was refused, and what to do about it.

    The id is in the answer's header 'x-request-id', and in every error.
    """
    for prefix, ask in _ASKED.items():
        if reference.startswith(prefix):
            _show(ask(platform, reference), is_json=is_json, is_quiet=is_quiet)
            return
    raise click.UsageError(f"'{clean(reference)}' is no id of a request; those begin with 'req_'")


def _request(platform: Platform, request_id: str) -> Item:
    answer: Item = platform.get(f"/v1/requests/{segment(request_id)}/why")
    model = f" for '{answer['model']}'" if answer["model"] else ""
    answer["title"] = f"{answer['id']}: {answer['route']}{model}, {answer['arrived_at']}"
    return answer


_ASKED: dict[str, Callable[[Platform, str], Item]] = {"req_": _request}
"""Who answers, by how the reference begins. An answer has ``title``, ``why`` and ``next_step``."""


def _show(answer: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json({name: value for name, value in answer.items() if name != "title"})
    elif is_quiet:
        print(clean(answer["next_step"]))
    else:
        print(clean(answer["title"]))
        for sentence in answer["why"]:
            print(f"  {clean(sentence)}")
        if answer["next_step"]:
            print(f"Next: {clean(answer['next_step'])}")
