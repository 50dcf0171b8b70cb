"""``modelyard why``: the reason for what happened, in words and numbers."""

import click

from modelyard.cli.http import Platform, ask_of, connected, segment
from modelyard.cli.output import Item, clean, formats, moment, show_json, stage_text

REQUEST_PREFIX = "req_"


@click.command(
    "why",
    epilog="\b\nExample:\n  modelyard why demo\n  modelyard why demo --json\n"
    "  modelyard why req_7hq2m4xkd9vwa3cn00000001",
    short_help="Say why an endpoint or a request is as it is.",
)
@click.argument("reference", metavar="ENDPOINT|REQUEST_ID")
@connected
@formats("Print only what to do next.")
def command(reference: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Say why an endpoint (its name or id) is as it is, or why a request went as it went, and what to do about it.

    The id of a request begins with 'req_'; it is in the answer's header 'x-request-id', and in every error.
    """
    if reference.startswith(REQUEST_PREFIX):
        _show_request(_of_request(platform, reference), is_json=is_json, is_quiet=is_quiet)
    else:
        _show_endpoint(_of_endpoint(platform, reference), is_json=is_json, is_quiet=is_quiet)


def _of_request(platform: Platform, request_id: str) -> Item:
    answer: Item = platform.get(f"/v1/requests/{segment(request_id)}/why")
    return answer


def _of_endpoint(platform: Platform, name: str) -> Item:
    answer: Item = ask_of(platform, name, platform.get, f"/v1/endpoints/{segment(name)}/why")
    return answer


def _show_request(answer: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(answer)
    elif is_quiet:
        print(clean(answer["next_step"]))
    else:
        model = f" for '{answer['model']}'" if answer["model"] else ""
        print(clean(f"{answer['id']}: {answer['route']}{model}, {answer['arrived_at']}"))
        for sentence in answer["why"]:
            print(f"  {clean(sentence)}")
        if answer["next_step"]:
            print(f"Next: {clean(answer['next_step'])}")


def _show_endpoint(answer: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(answer)
    elif is_quiet:
        steps = [one["next_step"] for one in answer["answers"] if one["next_step"]]
        for step in dict.fromkeys(steps):
            print(clean(step))
    else:
        print(clean(f"{answer['name']}: {answer['status']}, {stage_text(answer)}"))
        for one in answer["answers"]:
            when = f" ({moment(one['at'])})" if one["at"] else ""
            print(clean(f"{one['question']}{when}"))
            for line in one["answer"].splitlines():
                print(f"  {clean(line)}")
            if one["next_step"]:
                print(clean(f"  Next: {one['next_step']}"))
