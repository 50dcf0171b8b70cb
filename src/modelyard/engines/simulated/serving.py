"""How a request becomes an answer: plan the tokens, generate, and send them as they come or all at the end."""

import asyncio
from dataclasses import dataclass
from typing import Any

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.answers import Choice, Token, chat_choices, completion_choices
from modelyard.engines.simulated.attempts import Attempts, error_body, no_token
from modelyard.engines.simulated.batching import PrefixCache
from modelyard.engines.simulated.faults import Faults, cut_directives
from modelyard.engines.simulated.generation import Generation, Interrupted
from modelyard.engines.simulated.requests import (
    ChatRequest,
    CompletionRequest,
    Generate,
    Refused,
    decode,
)
from modelyard.engines.simulated.stream import Chunks, EventStream, encode, usage_of
from modelyard.engines.simulated.tokens import split

_FULL = "The engine is currently busy and cannot accept new requests. Please try again later."
"""In vLLM's words."""


@dataclass(slots=True)
class Answer:
    """One answer on its way out."""

    generation: Generation
    chunks: Chunks
    is_chat: bool
    wants_usage: bool
    connection: Connection

    @property
    def faults(self) -> Faults:
        """What this answer shall suffer."""
        return self.generation.faults

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        generation = self.generation
        faults, made = self.faults, generation.made
        usage = usage_of(generation.prompt_tokens, generation.cached_tokens, made)
        if faults.reasoning or faults.sound:
            usage["prompt_tokens_details"]["audio_tokens"] = min(faults.sound, generation.prompt_tokens)
            thought, said = min(faults.reasoning, made), min(faults.sound, made)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought, "audio_tokens": said}
        return usage


class Serving:
    """The routes that generate text."""

    def __init__(self, attempts: Attempts, cache: PrefixCache) -> None:
        self._attempts = attempts
        self._cache = cache
        self._answers = 0
        self._in_flight = 0

    async def chat(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/chat/completions``."""
        chat = decode(request.body, ChatRequest)
        rendered = chat.rendered()
        text, directive = cut_directives(chat.last_text())
        faults = self._attempts.faults(rendered, directive)
        if chat.continue_final_message:
            faults = faults.for_continued()
        prompt = split(rendered)
        room = self._room(chat, len(prompt))
        by_byte = faults.byte_tokens or self._attempts.accelerator.options.byte_tokens
        choices = chat_choices(chat, text, faults, room=room, by_byte=by_byte)
        await self._generate(request, connection, chat, prompt, choices, faults)

    async def completions(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/completions``."""
        completion = decode(request.body, CompletionRequest)
        prompts = completion.prompts()
        cut = [cut_directives(prompt) for prompt in prompts]
        faults = self._attempts.faults(prompts[0], " ".join(directive for _, directive in cut))
        pieces = [piece for prompt in prompts for piece in split(prompt)]
        room = self._room(completion, len(pieces))
        by_byte = faults.byte_tokens or self._attempts.accelerator.options.byte_tokens
        choices = completion_choices(completion, [text for text, _ in cut], faults, room=room, by_byte=by_byte)
        await self._generate(request, connection, completion, pieces, choices, faults)

    # --- generating ----------------------------------------------------------------

    def _room(self, request: Generate, prompt_tokens: int) -> int:
        """Return how many tokens each choice may have; refuse what can never fit, as vLLM does."""
        context = self._attempts.accelerator.options.context_length
        asked = request.length_max()
        if prompt_tokens + (1 if asked is None else asked) > context:
            raise Refused(
                400,
                f"This model's maximum context length is {context} tokens. However, you requested"
                f" {prompt_tokens + (asked or 0)} tokens ({prompt_tokens} in the prompt, {asked or 0} in the answer).",
            )
        return context - prompt_tokens

    async def _generate(
        self,
        request: Request,
        connection: Connection,
        asked: ChatRequest | CompletionRequest,
        prompt: list[bytes],
        choices: list[Choice],
        faults: Faults,
    ) -> None:
        limit = self._attempts.accelerator.options.queued_max
        if limit and self._in_flight >= limit:
            raise Refused(503, _FULL, "ServiceUnavailableError")
        self._in_flight += 1
        try:
            await self._answer(request, connection, asked, prompt, choices, faults)
        finally:
            self._in_flight -= 1

    async def _answer(
        self,
        request: Request,
        connection: Connection,
        asked: ChatRequest | CompletionRequest,
        prompt: list[bytes],
        choices: list[Choice],
        faults: Faults,
    ) -> None:
        model = self._attempts.check_model(asked.model)
        adapter = "" if model == self._attempts.model else model
        # A prefix is kept by who computed it, too.
        cached = self._cache.use((asked.cache_salt or "", adapter), prompt)
        plan = Generation("", len(prompt), cached, choices, faults, model=model)
        generation = self._attempts.begin(request, plan, stream=bool(asked.stream))
        is_chat = isinstance(asked, ChatRequest)
        self._answers += 1
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{generation.rid or 'sim'}-{self._answers}"
        created = int(self._attempts.accelerator.clock.unix_s())
        chunks = Chunks(
            is_chat=is_chat,
            answer_id=answer_id,
            created=created,
            model=model,
            choices=len(choices),
            top=asked.top(),
            adapter=adapter,
        )
        answer = Answer(generation, chunks, is_chat, asked.wants_usage(), connection)
        try:
            if await self._attempts.answered_wrongly(connection, faults):
                self._attempts.aborted(generation, "fault")
            elif asked.stream:
                await self._stream(answer)
            else:
                await self._body(answer)
        except asyncio.CancelledError:
            self._attempts.aborted(generation, "client gone")
            raise

    async def _body(self, answer: Answer) -> None:
        generation, faults = answer.generation, answer.faults
        try:
            await generation.run(self._attempts.accelerator, no_token)
        except Interrupted as fault:
            return await self._attempts.interrupt_body(answer.connection, generation, fault.how)
        usage = None if faults.null_usage else answer.usage()
        body = encode(answer.chunks.whole(generation.choices, usage, with_usage=not faults.no_usage))
        self._attempts.ended(generation, generation.choices[0].finish)
        if faults.garbage == "invalid_json":
            body = body[: len(body) // 2]
        if faults.split_bytes:
            answer.connection.begin_sized(len(body))
            for byte in body:
                answer.connection.write(bytes((byte,)))
                await asyncio.sleep(0)
            return None
        return answer.connection.respond(200, body)

    async def _stream(self, answer: Answer) -> None:
        stream = EventStream(answer.connection, answer.faults)
        if answer.faults.early_headers:
            stream.begin()
        writer = _StreamWriter(answer, stream)
        try:
            await answer.generation.run(self._attempts.accelerator, writer.token)
            await writer.finish()
        except Interrupted as fault:
            self._attempts.aborted(answer.generation, fault.how)
            return await writer.interrupted(fault.how)
        self._attempts.ended(answer.generation, answer.generation.choices[0].finish)
        return stream.end()


class _StreamWriter:
    """Turns tokens into events."""

    def __init__(self, answer: Answer, stream: EventStream) -> None:
        self._answer = answer
        self._stream = stream
        self._begun: set[int] = set()

    async def token(self, index: int, token: Token, is_last: bool) -> None:  # noqa: FBT001 - the form of Emit
        await self._open(index)
        if self._answer.faults.ping:
            await self._stream.comment()
        if self._answer.faults.garbage == "invalid_json":
            await self._stream.raw(b'data: {"id": "chatcmpl-broken", "choices": [{"delta\n\n')
            return
        chunk = self._answer.chunks.token(index, token, is_last=is_last)
        if chunk is not None:
            await self._send(chunk)

    async def finish(self) -> None:
        """Send the ends of all choices, usage if asked, and the end mark."""
        answer, faults = self._answer, self._answer.faults
        for index, choice in enumerate(answer.generation.choices):
            await self._open(index)
            if not faults.no_finish:
                await self._send(answer.chunks.finish(index, choice.finish))
        if answer.wants_usage and not faults.no_usage:
            usage = None if faults.null_usage else answer.usage()
            await self._stream.send(encode(answer.chunks.usage(usage)))
        if not faults.no_done:
            await self._stream.send(b"[DONE]")

    async def interrupted(self, how: str) -> None:
        """End the stream in the way that the fault asks."""
        form = self._answer.faults.error_form
        if how == "cut":
            self._stream.cut(encode(self._answer.chunks.text(0, "this event is cut in its middle")))
            return
        if how == "error":
            await self._stream.send(error_body(form), event="error" if form == "event" else "")
        self._stream.end()

    async def _open(self, index: int) -> None:
        if index in self._begun:
            return
        self._begun.add(index)
        if self._answer.is_chat and not self._answer.faults.missing_role:
            await self._send(self._answer.chunks.role(index))
        lead = self._answer.generation.choices[index].lead
        if lead:
            await self._send(self._answer.chunks.lead(index, lead))

    async def _send(self, chunk: dict[str, Any]) -> None:
        if self._answer.faults.usage_every_chunk:
            chunk = {**chunk, "usage": self._answer.usage()}
        elif self._answer.wants_usage:
            chunk = {**chunk, "usage": None}
        await self._stream.send(encode(chunk))
