"""Telling people: e-mail by the operator's mail server, and messages as Slack takes them, to a URL of the tenant's.

A notice is due in the store until it was taken, as webhooks are, so it
survives whatever happens here; it may come twice. It holds amounts and names of
the tenant's own, and nothing of requests.
"""

import asyncio
import logging
import smtplib
import ssl
from collections.abc import Callable
from email.message import EmailMessage
from email.utils import formatdate, parseaddr

import msgspec

from modelyard.clock import Clock
from modelyard.config.billing import SmtpConfig
from modelyard.control.tasks import boundary
from modelyard.domain.billing import BillingEvent, Channel, Notice, NoticeStatus
from modelyard.domain.events import EventType
from modelyard.policy.money import exact
from modelyard.policy.webhooks import next_try
from modelyard.stores import BillingStore
from modelyard.web.fetcher import Bounds, Fetcher, FetchError

LIMIT = 32
SENDING_MAX = 8
"""Notices under way at once: one slow receiver must not hold up the others."""
PAUSE_S = 15.0
SLACK_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 4096

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class NoticeError(Exception):
    """Why a notice was not taken; one line."""


class NoticeSender:
    """Sends what is due. ``chance`` is uniform in [0, 1)."""

    def __init__(
        self,
        *,
        store: BillingStore,
        smtp: SmtpConfig,
        fetcher: Fetcher,
        clock: Clock,
        chance: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._store = store
        self._smtp = smtp
        self._fetcher = fetcher
        self._clock = clock
        self._chance = chance
        self._tls = tls
        self._woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<NoticeSender by {self._smtp.host or 'no mail server'}>"

    def wake(self) -> None:
        """Look at once for what is due."""
        self._woken.set()

    async def run(self) -> None:
        """Send until cancelled; what is under way is then sent again by the next controller."""
        while True:
            self._woken.clear()
            with boundary("the sending of notices"):
                await self.round()
            try:
                async with asyncio.timeout(PAUSE_S):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def round(self) -> None:
        """Send what is due now, each once.

        Raises:
            StoreUnavailableError: what was sent may be sent again.
        """
        due = await self._store.due_notices(now=self._clock.unix_s(), limit=LIMIT)
        gate = asyncio.Semaphore(SENDING_MAX)
        async with asyncio.TaskGroup() as group:
            for notice in due:
                group.create_task(self._send(notice, gate), name=notice.id)

    async def _send(self, notice: Notice, gate: asyncio.Semaphore) -> None:
        async with gate:
            now = self._clock.unix_s()
            try:
                if notice.channel is Channel.EMAIL:
                    await self._mail(notice)
                else:
                    await self._post(notice)
            except NoticeError as error:
                after = self._failed(notice, str(error), now)
                _log.warning("a notice by %s was not taken: %s", notice.channel.value, error)
            except Exception as error:  # noqa: BLE001 - boundary: of one notice; all others go their way
                _log.exception("notice %s could not be made", notice.id)
                after = self._failed(notice, f"it could not be made: {_line(error)}", now)
            else:
                after = msgspec.structs.replace(
                    notice, status=NoticeStatus.SENT, due_at=None, tries=notice.tries + 1, error=""
                )
            await self._store.put_notice(after)

    def _failed(self, notice: Notice, reason: str, now: float) -> Notice:
        since = now if notice.since is None else notice.since
        tries = notice.tries + 1
        due = next_try(tries, since=since, now=self._clock.unix_s(), chance=self._chance())
        status = NoticeStatus.FAILED if due is None else NoticeStatus.PENDING
        return msgspec.structs.replace(notice, tries=tries, since=since, due_at=due, status=status, error=reason[:300])

    async def _post(self, notice: Notice) -> None:
        subject, text = told(notice.event)
        body = _encode({"text": f"*{_plain(subject)}*\n{_plain(text)}"})
        bounds = Bounds(timeout_s=SLACK_TIMEOUT_S, bytes_max=ANSWER_BYTES_MAX, is_cut=True)
        headers = {"content-type": "application/json"}
        try:
            answer = await self._fetcher.fetch("POST", notice.target, bounds=bounds, headers=headers, body=body)
        except FetchError as error:
            raise NoticeError(str(error)) from None
        if not 200 <= answer.status < 300:
            raise NoticeError(f"the receiver answered {answer.status}")

    async def _mail(self, notice: Notice) -> None:
        message = email_of(notice, self._smtp.sender)
        try:
            # Each answer of the server has its own bound; a conversation has about ten.
            async with asyncio.timeout(10 * self._smtp.timeout_s):
                await asyncio.to_thread(_deliver, self._smtp, message, self._tls)
        except TimeoutError:
            raise NoticeError("the mail server took too long") from None
        except (smtplib.SMTPException, OSError) as error:
            raise NoticeError(f"the mail server did not take it: {_line(error)}") from None


def told(event: BillingEvent) -> tuple[str, str]:
    """Return the subject and the text about an event."""
    data = event.data
    currency = data.get("currency") or ""
    if event.type in (EventType.BUDGET_THRESHOLD, EventType.BUDGET_EXCEEDED):
        spent, amount = (_amount(data[name], currency) for name in ("spent_nanousd", "amount_nanousd"))
        of = [f"{kind} {data[name]}" for kind, name in (("key", "key_id"), ("model", "model")) if data[name]]
        name = f" '{data['name']}'" if data["name"] else ""
        subject = f"Budget{name}: {data['threshold_percent']} % reached in {data['month']}"
        return subject, f"{spent} of {amount} are spent by {' and '.join(of) or 'all keys'} of {data['tenant_id']}."
    if event.type == "invoice.issued":
        return f"Invoice {data['number']} for {data['month']}", f"{data['total']} {currency} are to be paid."
    if event.type == "credit.low":
        left = _amount(data["left_nanousd"], currency)
        return "The prepaid credit is nearly used up", f"{left} of credit are left of {data['tenant_id']}."
    if event.type == "webhook.disabled":
        id = data["webhook_id"]
        fix = f"modelyard webhooks set {id} --enable, then: modelyard webhooks replay {id} --since 7d"
        return "A webhook was disabled", f"{data['url']} is told nothing more: {data['reason']}. Repair it, then: {fix}"
    return "The prepaid credit is used up", f"No credit is left of {data['tenant_id']}."


def email_of(notice: Notice, sender: str) -> EmailMessage:
    """Return the e-mail of a notice; the same at every try, so that a second one is known for what it is."""
    subject, text = told(notice.event)
    message = EmailMessage()
    message["Subject"] = subject.replace("\r", " ").replace("\n", " ")
    message["From"] = sender
    message["To"] = notice.target
    message["Date"] = formatdate(notice.event.at)
    # Without its time and chance, which make_msgid would add: the same message has the same name.
    domain = parseaddr(sender)[1].rpartition("@")[2] or "localhost"
    message["Message-ID"] = f"<{notice.id}@{domain}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{text}\n\nEvent {notice.event.id}\n")
    return message


def _deliver(smtp: SmtpConfig, message: EmailMessage, tls: ssl.SSLContext | None) -> None:
    """Hand the message to the mail server; runs in a thread."""
    context = tls or ssl.create_default_context()
    if smtp.security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(smtp.host, smtp.port, timeout=smtp.timeout_s, context=context)
    else:
        server = smtplib.SMTP(smtp.host, smtp.port, timeout=smtp.timeout_s)
    with server:
        if smtp.security == "starttls":
            server.starttls(context=context)
        if smtp.username and smtp.security != "none":
            server.login(smtp.username, smtp.password)
        server.send_message(message)


def _amount(nano: object, currency: object) -> str:
    return f"{exact(int(str(nano)))} {currency}"


def _plain(text: str) -> str:
    """Return text in which Slack sees no markup: three characters mean something to it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
