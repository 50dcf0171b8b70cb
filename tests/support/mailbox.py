"""A mail server of a few commands on a free port, as strict as it needs to be: STARTTLS, AUTH PLAIN, one message each.

It keeps what it took: who was named as sender and receiver, and the parsed message.
"""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from pathlib import Path


@dataclass
class Letter:
    """A message that was taken."""

    sender: str
    receivers: list[str]
    message: Message
    was_encrypted: bool
    user: str


@dataclass
class Mailbox:
    """The server and what it took. ``refusals`` are answers to the next messages, instead of taking them."""

    port: int = 0
    letters: list[Letter] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    tls: ssl.SSLContext | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Have one conversation."""
        try:
            await _Talk(self, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class _Talk:
    def __init__(self, box: Mailbox, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.box, self.reader, self.writer = box, reader, writer
        self.is_encrypted = False
        self.user = self.sender = ""
        self.receivers: list[str] = []

    async def say(self, *lines: str) -> None:
        for line in lines:
            self.writer.write(line.encode() + b"\r\n")
        await self.writer.drain()

    async def run(self) -> None:
        await self.say("220 mailbox")
        while line := (await self.reader.readline()).decode("ascii").strip():
            verb = line.partition(" ")[0].upper()
            if verb == "QUIT":
                await self.say("221 bye")
                return
            await self.answer(verb, line)

    async def answer(self, verb: str, line: str) -> None:
        if verb == "EHLO":
            able = ["AUTH PLAIN"] if self.is_encrypted or self.box.tls is None else []
            able += ["STARTTLS"] if self.box.tls is not None and not self.is_encrypted else []
            await self.say("250-mailbox", *[f"250-{one}" for one in able], "250 OK")
        elif verb == "STARTTLS" and self.box.tls is not None:
            await self.say("220 go")
            await self.writer.start_tls(self.box.tls)
            self.is_encrypted = True
        elif verb == "AUTH":
            _, user, password = base64.b64decode(line.split()[2]).decode().split("\0")
            self.user = user
            await self.say("235 welcome" if password == "right" else "535 wrong password")
        elif verb in {"MAIL", "RCPT"}:
            address = line[line.index("<") + 1 : line.index(">")]
            if verb == "MAIL":
                self.sender = address
            else:
                self.receivers.append(address)
            await self.say("250 OK")
        elif verb == "DATA":
            await self.take()
        else:
            await self.say("250 OK" if verb in {"NOOP", "RSET"} else "502 not here")

    async def take(self) -> None:
        await self.say("354 go on")
        body = (await self.reader.readuntil(b"\r\n.\r\n"))[:-5]
        if self.box.refusals:
            await self.say(self.box.refusals.pop(0))
            return
        message = message_from_bytes(body.replace(b"\r\n..", b"\r\n."))
        self.box.letters.append(Letter(self.sender, self.receivers, message, self.is_encrypted, self.user))
        await self.say("250 taken")


@asynccontextmanager
async def mailbox(certificate: tuple[Path, Path] | None = None) -> AsyncIterator[Mailbox]:
    """Yield a server that runs; with a certificate it offers STARTTLS, and AUTH only after it."""
    box = Mailbox()
    if certificate is not None:
        box.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        box.tls.load_cert_chain(*certificate)
    server = await asyncio.start_server(box.serve, "127.0.0.1", 0)
    box.port = server.sockets[0].getsockname()[1]
    try:
        yield box
    finally:
        server.close()
        await server.wait_closed()
