"""``modelyard webhooks``: where a tenant is told of its events. A secret is printed once, when it is made."""

from typing import Any

import click

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.http import PAGE, Platform, connected, segment
from modelyard.cli.nouns import DURATION, NounGroup
from modelyard.cli.output import (
    Item,
    age,
    clean,
    formats,
    listing,
    moment,
    owners,
    remark,
    show_json,
    show_list,
    show_pairs,
)
from modelyard.clock import SystemClock

_ID = "wh_7hq2m4xkd9vwa3cnbt5ruyz8ef"
_DELIVERY = "dlv_2mw8k4tq7hzx9vca3nbd5ruye6"
_EXAMPLE = f"""\b
Example:
  modelyard webhooks add https://example.com/hooks --on 'batch.*' --on budget.exceeded
  modelyard webhooks
  modelyard webhooks test {_ID}
  modelyard webhooks deliveries {_ID} --status failed
  modelyard webhooks replay {_ID} --since 2d"""


@click.group(
    "webhooks", cls=NounGroup, epilog=_EXAMPLE, short_help="Add, test, replay and remove webhooks; see what they got."
)
def command() -> None:
    """Add, list, show, change, test, rotate and remove webhooks, and send again what they missed; alone: list."""


@command.command("list", epilog="\b\nExample:\n  modelyard webhooks list --json")
@connected
@listing
def list_webhooks(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List webhooks and how they are; their secrets are never shown again."""
    columns = {
        "ID": lambda webhook: webhook["id"],
        "URL": lambda webhook: webhook["url"],
        "EVENTS": lambda webhook: ",".join(webhook["event_types"]),
        "STATUS": lambda webhook: webhook["status"],
        "PENDING": lambda webhook: webhook["pending"],
        "AGE": lambda webhook: age(webhook["created_at"]),
    }
    webhooks = platform.all("/v1/webhooks", limit=PAGE)
    columns |= owners(webhooks, "tenant_id")
    empty = "No webhooks. Add one: modelyard webhooks add URL --on 'batch.*'"
    show_list(webhooks, columns, is_json=is_json, is_quiet=is_quiet, empty=empty)


@command.command(
    "add",
    epilog="\b\nExample:\n  modelyard webhooks add https://example.com/hooks\n"
    "  modelyard webhooks add https://example.com/batches --on 'batch.*' --description 'the nightly jobs'",
)
@click.argument("receiver", metavar="RECEIVER_URL")
@click.option(
    "--on",
    "types",
    multiple=True,
    metavar="TYPE",
    help="Type of event, like batch.completed, 'batch.*'; repeatable. [default: all]",
)
@click.option("--description", default="", help="What it is for.")
@click.option("--disabled", "is_disabled", is_flag=True, help="Tell it nothing yet.")
@connected
@formats("Print only the secret.")
def add(receiver: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Tell RECEIVER_URL of events, and print the secret that signs them, this once."""
    body: Item = {"url": receiver, "description": given["description"], "enabled": not given["is_disabled"]}
    if given["types"]:
        body["event_types"] = list(given["types"])
    _show_new(platform.post("/v1/webhooks", body), is_json=is_json, is_quiet=is_quiet)


@command.command("show", epilog=f"\b\nExample:\n  modelyard webhooks show {_ID}")
@click.argument("webhook_id")
@connected
@formats("Print only its status.")
def show(webhook_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Show a webhook, how it is and why."""
    _show(platform.get(f"/v1/webhooks/{segment(webhook_id)}"), is_json=is_json, is_quiet=is_quiet)


@command.command(
    "set",
    epilog=f"\b\nExample:\n  modelyard webhooks set {_ID} --enable\n"
    f"  modelyard webhooks set {_ID} --to https://example.com/new --on '*'",
)
@click.argument("webhook_id")
@click.option("--to", "to_url", metavar="NEW_URL", help="Where events are sent from now on, those that wait too.")
@click.option(
    "--on", "types", multiple=True, metavar="TYPE", help="Types of events, in place of those before; repeatable."
)
@click.option("--description", help="What it is for.")
@click.option("--enable/--disable", "is_enabled", default=None, help="Tell it of events, or give up what waits for it.")
@connected
@formats("Print only its status.")
def change(webhook_id: str, *, platform: Platform, is_json: bool, is_quiet: bool, **given: Any) -> None:
    """Change a webhook; what is not given stays."""
    named = {"url": "to_url", "description": "description", "enabled": "is_enabled"}
    body: Item = {name: given[option] for name, option in named.items() if given[option] is not None}
    if given["types"]:
        body["event_types"] = list(given["types"])
    if not body:
        raise Failure("Nothing to change. Give --to, --on, --description, --enable or --disable.", Exit.USAGE)
    _show(platform.patch(f"/v1/webhooks/{segment(webhook_id)}", body), is_json=is_json, is_quiet=is_quiet)


@command.command("test", epilog=f"\b\nExample:\n  modelyard webhooks test {_ID}")
@click.argument("webhook_id")
@connected
@formats("Print only what the receiver answered.")
def test(webhook_id: str, *, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Send a webhook.test now, once, and say what the receiver answered; exit code 1 where it did not take it."""
    delivery = platform.post(f"/v1/webhooks/{segment(webhook_id)}/test", {})
    if is_json:
        show_json(delivery)
    elif is_quiet:
        print(clean(_answer_text(delivery)))
    elif delivery["status"] == "delivered":
        took_ms = delivery["attempts"][-1]["took_ms"]
        print(clean(f"Taken: {_answer_text(delivery)}, in {took_ms} ms; event {delivery['event_id']}."))
    if delivery["status"] != "delivered":
        raise Failure(f"The receiver did not take it: {_answer_text(delivery)}. It must answer 2xx within 10 s.")


@command.command("deliveries", epilog=f"\b\nExample:\n  modelyard webhooks deliveries {_ID} --status failed")
@click.argument("webhook_id")
@click.option("--status", type=click.Choice(["pending", "delivered", "failed"]), help="Only those that are so.")
@click.option("--last", type=click.IntRange(1, PAGE), default=20, show_default=True, help="How many of the newest.")
@connected
@listing
def deliveries(
    webhook_id: str, *, status: str | None, last: int, platform: Platform, is_json: bool, is_quiet: bool
) -> None:
    """List what a webhook got, what it is still to get, and what its receiver answered."""
    columns = {
        "ID": lambda delivery: delivery["id"],
        "EVENT": lambda delivery: delivery["event_type"],
        "STATUS": lambda delivery: delivery["status"],
        "TRIES": lambda delivery: delivery["tries"],
        "LAST": _answer_text,
        "NEXT": lambda delivery: moment(delivery["next_attempt_at"]),
        "AGE": lambda delivery: age(delivery["created_at"]),
    }
    query = {"limit": last} | ({"status": status} if status else {})
    found = platform.get(f"/v1/webhooks/{segment(webhook_id)}/deliveries", **query)["data"]
    show_list(found, columns, is_json=is_json, is_quiet=is_quiet, empty="No deliveries.")


@command.command("redeliver", epilog=f"\b\nExample:\n  modelyard webhooks redeliver {_ID} {_DELIVERY}")
@click.argument("webhook_id")
@click.argument("delivery_id")
@connected
def redeliver(webhook_id: str, delivery_id: str, *, platform: Platform) -> None:
    """Send one delivery again, under the same event id."""
    platform.post(f"/v1/webhooks/{segment(webhook_id)}/deliveries/{segment(delivery_id)}/redeliver", {})
    remark(f"{delivery_id} is sent again. See: modelyard webhooks deliveries {webhook_id}")


@command.command(
    "replay",
    epilog=f"\b\nExample:\n  modelyard webhooks replay {_ID} --since 2d\n"
    f"  modelyard webhooks replay {_ID} --since 1h --delivered-too",
)
@click.argument("webhook_id")
@click.option("--since", "since_s", type=DURATION, required=True, help="How far back: 90m, 12h, 2d.")
@click.option("--delivered-too", is_flag=True, help="Also what its receiver took already.")
@connected
@formats("Print only how many.")
def replay(
    webhook_id: str, *, since_s: float, delivered_too: bool, platform: Platform, is_json: bool, is_quiet: bool
) -> None:
    """Send again what happened since then: what the receiver does not have, also from before the webhook was added."""
    body: Item = {"since": SystemClock.unix_s() - since_s, "delivered_too": delivered_too}
    count, path = 0, f"/v1/webhooks/{segment(webhook_id)}/replay"
    while True:
        part = platform.post(path, body)
        count += part["count"]
        if not part["has_more"]:
            break
        body["after"] = part["last_event_id"]
    if is_json:
        show_json({"object": "webhook.replay", "count": count})
    elif is_quiet:
        print(count)
    else:
        print(f"{count} event{'' if count == 1 else 's'} to send. See: modelyard webhooks deliveries {webhook_id}")


@command.command("rotate", epilog=f"\b\nExample:\n  modelyard webhooks rotate {_ID} --overlap 1h")
@click.argument("webhook_id")
@click.option(
    "--overlap", "overlap_s", type=DURATION, default="1d", show_default=True, help="How long both secrets sign."
)
@connected
@formats("Print only the secret.")
def rotate(webhook_id: str, *, overlap_s: float, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Give a webhook a new secret and print it, this once."""
    body = {"overlap_seconds": int(overlap_s)}
    webhook = platform.post(f"/v1/webhooks/{segment(webhook_id)}/rotate", body)
    _show_new(webhook, is_json=is_json, is_quiet=is_quiet)
    if (until := webhook["previous_secret_expires_at"]) and not (is_json or is_quiet):
        remark(f"Messages are signed with the old secret too until {moment(until)}.")


@command.command("rm", epilog=f"\b\nExample:\n  modelyard webhooks rm {_ID}")
@click.argument("webhook_id")
@connected
def remove(webhook_id: str, *, platform: Platform) -> None:
    """Remove a webhook and what was still to be sent to it."""
    platform.delete(f"/v1/webhooks/{segment(webhook_id)}")
    remark(f"Removed {webhook_id}.")


def _show_new(webhook: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(webhook)
    elif is_quiet:
        print(webhook["secret"])
    else:
        events = ", ".join(webhook["event_types"])
        show_pairs({"ID": webhook["id"], "URL": webhook["url"], "Events": events, "Secret": webhook["secret"]})
        remark("Keep the secret now: it is not shown again.")


def _show(webhook: Item, *, is_json: bool, is_quiet: bool) -> None:
    if is_json:
        show_json(webhook)
    elif is_quiet:
        print(webhook["status"])
    else:
        until = webhook["previous_secret_expires_at"]
        show_pairs(
            {
                "ID": webhook["id"],
                "URL": webhook["url"],
                "Description": webhook["description"],
                "Events": ", ".join(webhook["event_types"]),
                "Status": webhook["status"],
                "Why": webhook["why"],
                "Pending": webhook["pending"],
                "Old secret signs until": moment(until) if until else None,
                "Created": moment(webhook["created_at"]),
            }
        )


def _answer_text(delivery: Item) -> str:
    """Return what the receiver answered last."""
    if not delivery["attempts"]:
        return "-"
    last = delivery["attempts"][-1]
    status = "" if last["status_code"] is None else f"HTTP {last['status_code']}"
    return ": ".join(part for part in (status, last["error"] or last["response"]) if part)
