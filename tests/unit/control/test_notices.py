"""Notices reach a real mail server and a real HTTP receiver, are tried again when not taken, and carry no markup."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.conformance.backends import open_fresh
from tests.support.certificates import make_certificate
from tests.support.mailbox import Mailbox, mailbox

from modelyard.clock import ManualClock
from modelyard.config.billing import SmtpConfig
from modelyard.control.notices import NoticeSender, email_of, told
from modelyard.domain.billing import BillingEvent, Channel, EventData, Notice, NoticeStatus
from modelyard.domain.tenants import Tenant
from modelyard.policy.addresses import networks
from modelyard.policy.webhooks import GIVE_UP_S
from modelyard.stores.sql import Database, SqlBillingStore, SqlControlStore
from modelyard.web.fetcher import Fetcher

EVENT = BillingEvent(
    "evt-1",
    "ten-a",
    "budget.threshold",
    1_800_000_000,
    "once",
    {
        "budget_id": "bud-1",
        "name": "<all>",
        "key_id": None,
        "model": "chat",
        "tenant_id": "ten-a",
        "month": "2026-11",
        "threshold_percent": 80,
        "amount_nanousd": 10_000_000_000,
        "spent_nanousd": 8_100_000_001,
        "currency": "EUR",
    },
)


class Place:
    def __init__(self, database: Database) -> None:
        self.store = SqlBillingStore(database)
        self.clock = ManualClock(start_s=1_800_000_000.0)

    def sender(self, smtp: SmtpConfig, tls: ssl.SSLContext | None = None) -> NoticeSender:
        fetcher = Fetcher(networks(("127.0.0.0/8",)))
        return NoticeSender(store=self.store, smtp=smtp, fetcher=fetcher, clock=self.clock, chance=lambda: 0.5, tls=tls)

    async def tell(self, channel: Channel, target: str) -> None:
        notice = Notice("ntc-1", EVENT, channel, target, due_at=self.clock.unix_s())
        assert await self.store.add_event(EVENT, [notice])

    async def notice(self) -> Notice:
        (notice,) = await self.store.notices(EVENT.id)
        return notice


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    database = open_fresh("sqlite", tmp_path)
    await SqlControlStore(database).add_tenant(Tenant(EVENT.tenant_id, "a", created_at=1))
    yield Place(database)
    await database.close()


def plain(box: Mailbox, **more: object) -> SmtpConfig:
    given: dict[str, object] = {"host": "127.0.0.1", "port": box.port, "security": "none", "timeout_s": 5.0, **more}
    return SmtpConfig(sender="yard@example.com", **given)  # type: ignore[arg-type]


async def test_an_e_mail_says_what_happened_and_is_sent_once(place: Place) -> None:
    async with mailbox() as box:
        await place.tell(Channel.EMAIL, "m@acme.example")
        sender = place.sender(plain(box))
        await sender.round()
        await sender.round()
    (letter,) = box.letters
    assert (letter.sender, letter.receivers) == ("yard@example.com", ["m@acme.example"])
    assert letter.message["Subject"] == "Budget '<all>': 80 % reached in 2026-11"
    assert letter.message["Auto-Submitted"] == "auto-generated"
    assert "8.100000001 EUR of 10 EUR are spent by model chat of ten-a." in str(letter.message.get_payload())
    assert ((await place.notice()).status, (await place.notice()).tries) == (NoticeStatus.SENT, 1)


async def test_a_password_goes_over_tls_only(place: Place, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with mailbox((certificate, key)) as box:
        await place.tell(Channel.EMAIL, "m@acme.example")
        settings = plain(box, security="starttls", username="yard", password="right")
        await place.sender(settings, ssl.create_default_context(cafile=str(certificate))).round()
    (letter,) = box.letters
    assert (letter.was_encrypted, letter.user) == (True, "yard")


@pytest.mark.parametrize("refusal", ["451 come again", "552 mailbox full"])
async def test_what_is_not_taken_is_tried_again_and_given_up_after_days(place: Place, refusal: str) -> None:
    async with mailbox() as box:
        box.refusals += [refusal] * 2
        await place.tell(Channel.EMAIL, "m@acme.example")
        sender = place.sender(plain(box))
        await sender.round()
        notice = await place.notice()
        assert (notice.status, notice.tries) == (NoticeStatus.PENDING, 1)
        assert refusal[:3] in notice.error
        await sender.round()
        assert (await place.notice()).tries == 1, "it is not due yet"
        place.clock.advance(GIVE_UP_S)
        await sender.round()
    notice = await place.notice()
    assert (notice.status, notice.due_at, box.letters) == (NoticeStatus.FAILED, None, [])


async def test_a_mail_server_that_is_not_there_holds_up_nobody(place: Place) -> None:
    async with mailbox() as box:
        pass
    await place.tell(Channel.EMAIL, "m@acme.example")
    await place.sender(plain(box)).round()
    assert "did not take it" in (await place.notice()).error


async def test_a_message_for_slack_has_its_shape_and_no_markup_of_names(place: Place) -> None:
    got: list[bytes] = []
    statuses = [b"500 No", b"200 OK"]

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
        got.append(await reader.readexactly(int(length)))
        writer.write(b"HTTP/1.1 " + statuses.pop(0) + b"\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await place.tell(Channel.SLACK, f"http://127.0.0.1:{port}/services/x")
        sender = place.sender(SmtpConfig())
        await sender.round()
        assert (await place.notice()).error == "the receiver answered 500"
        place.clock.advance(60)
        await sender.round()
    assert (await place.notice()).status is NoticeStatus.SENT
    assert got[0] == got[1]
    text = json.loads(got[0])["text"]
    assert text.startswith("*Budget '&lt;all&gt;': 80 % reached in 2026-11*\n8.100000001 EUR")


def test_every_kind_of_event_is_told_in_words() -> None:
    issued = BillingEvent(
        "e", "t", "invoice.issued", 1, "o", {"number": "INV-1", "month": "2026-11", "total": "12.34", "currency": "EUR"}
    )
    assert told(issued) == ("Invoice INV-1 for 2026-11", "12.34 EUR are to be paid.")
    low = BillingEvent(
        "e", "t", "credit.low", 1, "o", {"tenant_id": "t", "currency": "EUR", "left_nanousd": 1500000000}
    )
    assert told(low) == ("The prepaid credit is nearly used up", "1.5 EUR of credit are left of t.")
    used_up = BillingEvent("e", "t", "credit.exhausted", 1, "o", {"tenant_id": "ten-a", "currency": "EUR"})
    assert told(used_up)[0] == "The prepaid credit is used up"
    data: EventData = {"webhook_id": "wh_1", "url": "https://x", "reason": "y"}
    disabled = BillingEvent("e", "t", "webhook.disabled", 1, "o", data)
    subject, text = told(disabled)
    assert subject == "A webhook was disabled"
    assert text.startswith("https://x is told nothing more: y. Repair it, then: modelyard webhooks set wh_1 --enable")


async def test_one_that_cannot_be_made_holds_up_no_other_and_is_given_up(place: Place) -> None:
    unlike_any = {name: value for name, value in EVENT.data.items() if name != "spent_nanousd"}
    broken = msgspec.structs.replace(EVENT, id="evt-2", once="other", data=unlike_any)
    notice = Notice("ntc-0", broken, Channel.EMAIL, "m@acme.example", due_at=1.0)
    async with mailbox() as box:
        await place.store.add_event(broken, [notice])
        await place.tell(Channel.EMAIL, "m@acme.example")
        sender = place.sender(plain(box))
        await sender.round()
        assert [letter.receivers for letter in box.letters] == [["m@acme.example"]]
        (kept,) = await place.store.notices("evt-2")
        assert (kept.status, kept.tries) == (NoticeStatus.PENDING, 1)
        place.clock.advance(GIVE_UP_S)
        await sender.round()
    (kept,) = await place.store.notices("evt-2")
    assert kept.status is NoticeStatus.FAILED
    assert "could not be made" in kept.error


def test_the_same_message_has_the_same_name_at_every_try() -> None:
    notice = Notice("ntc-1", EVENT, Channel.EMAIL, "m@acme.example", due_at=1.0)
    names = [email_of(notice, "Model Yard <yard@example.com>")["Message-ID"] for _ in range(2)]
    assert names == ["<ntc-1@example.com>"] * 2
