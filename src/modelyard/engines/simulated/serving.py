"""How a request becomes an answer: plan the tokens, generate, and send them as they come or all at the end."""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from modelyard.engines.simulated.answers import Choice, Token, chat_choices, completion_choices
from modelyard.engines.simulated.batching import PrefixCache
from modelyard.engines.simulated.embedding import as_base64, vector_of
from modelyard.engines.simulated.faults import FaultPlan, Faults, cut_directives
from modelyard.engines.simulated.generation import Accelerator, Generation, Interrupted
from modelyard.engines.simulated.http import Connection, Request
from modelyard.engines.simulated.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Generate,
    Refused,
    body_keys,
    decode,
    texts_of,
)
from modelyard.engines.simulated.stream import Chunks, EventStream, encode, usage_of
from modelyard.engines.simulated.tokens import blocks_for, split

_ERROR_TEXT = "The engine failed, as a directive asks."


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
        return usage_of(generation.prompt_tokens, generation.cached_tokens, generation.made)


class Serving:
    """The three inference routes."""

    def __init__(self, accelerator: Accelerator, cache: PrefixCache, plan: FaultPlan, model: str) -> None:
        self._accelerator = accelerator
        self._cache = cache
        self._plan = plan
        self._model = model
        self._answers = 0

    async def chat(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/chat/completions``."""
        chat = decode(request.body, ChatRequest)
        rendered = chat.rendered()
        text, directive = cut_directives(chat.last_text())
        faults = self._faults(rendered, directive)
        if chat.continue_final_message:
            faults = faults.for_continued()
        prompt = split(rendered)
        room = self._room(chat, len(prompt))
        by_byte = faults.byte_tokens or self._accelerator.options.byte_tokens
        choices = chat_choices(chat, text, faults, room=room, by_byte=by_byte)
        await self._generate(request, connection, chat, prompt, choices, faults)

    async def completions(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/completions``."""
        completion = decode(request.body, CompletionRequest)
        prompts = completion.prompts()
        cut = [cut_directives(prompt) for prompt in prompts]
        faults = self._faults(prompts[0], " ".join(directive for _, directive in cut))
        pieces = [piece for prompt in prompts for piece in split(prompt)]
        room = self._room(completion, len(pieces))
        by_byte = faults.byte_tokens or self._accelerator.options.byte_tokens
        choices = completion_choices(completion, [text for text, _ in cut], faults, room=room, by_byte=by_byte)
        await self._generate(request, connection, completion, pieces, choices, faults)

    async def embeddings(self, request: Request, connection: Connection) -> None:
        """Answer ``POST /v1/embeddings``."""
        wanted = decode(request.body, EmbeddingsRequest)
        self._check_model(wanted.model)
        texts = texts_of(wanted.input, "input")
        dimensions = self._accelerator.options.embedding_dimensions
        keep = wanted.dimensions or dimensions
        if keep > dimensions:
            raise Refused(400, f"dimensions must be at most {dimensions}")
        if "" in texts:
            raise Refused(400, "input must not be empty")
        pieces = [piece for text in texts for piece in split(text)]
        _, directive = cut_directives(" ".join(texts))
        faults = self._faults(texts[0], directive)
        generation = self._begin(request, pieces, 0, [], faults, stream=False)
        try:
            if await self._answered_wrongly(connection, faults):
                return self._aborted(generation, "fault")
            await generation.run(self._accelerator, _no_token)
        except Interrupted as fault:
            return await self._interrupt_body(connection, generation, fault.how)
        except asyncio.CancelledError:
            self._aborted(generation, "client gone")
            raise
        vectors = [vector_of(text, dimensions, keep) for text in texts]
        as_text = wanted.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": as_base64(vector) if as_text else vector}
            for i, vector in enumerate(vectors)
        ]
        body: dict[str, Any] = {"object": "list", "data": data, "model": self._model}
        if not faults.no_usage:
            body["usage"] = None if faults.null_usage else {"prompt_tokens": len(pieces), "total_tokens": len(pieces)}
        self._ended(generation, "stop")
        return connection.respond(200, encode(body))

    # --- before ------------------------------------------------------------------

    def _faults(self, prompt: str, directive: str) -> Faults:
        try:
            return self._plan.for_request(prompt, directive)
        except ValueError as error:
            raise Refused(400, str(error)) from error

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            raise Refused(404, f"The model `{model}` does not exist.", "NotFoundError")

    def _room(self, request: Generate, prompt_tokens: int) -> int:
        """Return how many tokens each choice may have; refuse what can never fit, as vLLM does."""
        self._check_model(request.model)
        context = self._accelerator.options.context_length
        asked = request.length_max()
        if prompt_tokens + (1 if asked is None else asked) > context:
            raise Refused(
                400,
                f"This model's maximum context length is {context} tokens. However, you requested"
                f" {prompt_tokens + (asked or 0)} tokens ({prompt_tokens} in the prompt, {asked or 0} in the answer).",
            )
        return context - prompt_tokens

    def _begin(
        self, request: Request, prompt: list[bytes], cached: int, choices: list[Choice], faults: Faults, *, stream: bool
    ) -> Generation:
        needed = blocks_for(len(prompt) + sum(len(choice.tokens) for choice in choices))
        if needed > self._accelerator.batch.blocks:
            raise Refused(400, f"The request needs {needed} KV blocks, there are {self._accelerator.batch.blocks}.")
        generation = Generation(
            rid=request.headers.get("x-request-id", ""),
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            choices=choices,
            faults=faults,
        )
        self._accelerator.journal.write(
            generation.rid,
            "begin",
            path=request.path,
            stream=stream,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=cached,
            body_keys=body_keys(request.body),
            header_names=list(request.headers),
        )
        return generation

    # --- generating ----------------------------------------------------------------

    async def _generate(
        self,
        request: Request,
        connection: Connection,
        asked: ChatRequest | CompletionRequest,
        prompt: list[bytes],
        choices: list[Choice],
        faults: Faults,
    ) -> None:
        cached = self._cache.use(asked.cache_salt or "", prompt)
        generation = self._begin(request, prompt, cached, choices, faults, stream=bool(asked.stream))
        is_chat = isinstance(asked, ChatRequest)
        self._answers += 1
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{generation.rid or 'sim'}-{self._answers}"
        created = int(self._accelerator.clock.unix_s())
        chunks = Chunks(
            is_chat=is_chat,
            answer_id=answer_id,
            created=created,
            model=self._model,
            choices=len(choices),
            top=asked.top(),
        )
        answer = Answer(generation, chunks, is_chat, asked.wants_usage(), connection)
        try:
            if await self._answered_wrongly(connection, faults):
                self._aborted(generation, "fault")
            elif asked.stream:
                await self._stream(answer)
            else:
                await self._body(answer)
        except asyncio.CancelledError:
            self._aborted(generation, "client gone")
            raise

    async def _body(self, answer: Answer) -> None:
        generation, faults = answer.generation, answer.faults
        try:
            await generation.run(self._accelerator, _no_token)
        except Interrupted as fault:
            return await self._interrupt_body(answer.connection, generation, fault.how)
        usage = None if faults.null_usage else answer.usage()
        body = encode(answer.chunks.whole(generation.choices, usage, with_usage=not faults.no_usage))
        self._ended(generation, generation.choices[0].finish)
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
            await answer.generation.run(self._accelerator, writer.token)
            await writer.finish()
        except Interrupted as fault:
            self._aborted(answer.generation, fault.how)
            return await writer.interrupted(fault.how)
        self._ended(answer.generation, answer.generation.choices[0].finish)
        return stream.end()

    # --- after -----------------------------------------------------------------------

    def _ended(self, generation: Generation, finish: str) -> None:
        finished = self._accelerator.totals.finished
        finished[finish] = finished.get(finish, 0) + 1
        self._accelerator.journal.write(
            generation.rid,
            "end",
            n=generation.made,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            finish=finish,
        )

    def _aborted(self, generation: Generation, why: str) -> None:
        finished = self._accelerator.totals.finished
        finished["abort"] = finished.get("abort", 0) + 1
        self._accelerator.journal.write(generation.rid, "abort", n=generation.made, why=why)

    async def _answered_wrongly(self, connection: Connection, faults: Faults) -> bool:
        """Send the answers that replace a generation; say whether one did."""
        if faults.http_error is not None:
            connection.respond(faults.http_error, Refused(faults.http_error, _ERROR_TEXT, "InternalServerError").body())
        elif faults.garbage == "error_200":
            connection.respond(200, Refused(500, _ERROR_TEXT, "InternalServerError").body())
        elif faults.garbage == "content_type":
            connection.respond(200, b"<html><body>It works!</body></html>", "text/html")
        elif faults.huge_line is not None:
            stream = EventStream(connection, faults)
            await stream.huge_line(faults.huge_line)
            stream.end()
        else:
            return False
        return True

    async def _interrupt_body(self, connection: Connection, generation: Generation, how: str) -> None:
        self._aborted(generation, how)
        if how == "error":
            body = error_body(generation.faults.error_form)
            return connection.respond(500, body)
        connection.begin_sized(1000)
        connection.write(b'{"id":"chatcmpl-cut","object":"chat.com')
        return connection.close()


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


async def _no_token(_index: int, _token: Token, _is_last: bool) -> None:  # noqa: FBT001 - the form of Emit
    """Drop the token: the body is made at the end."""


def error_body(form: str) -> bytes:
    """Return an error in one of the three forms that engines use in a stream."""
    if form == "flat":
        flat = {"object": "error", "message": _ERROR_TEXT, "type": "InternalServerError", "param": None, "code": 500}
        return msgspec.json.encode(flat)
    return Refused(500, _ERROR_TEXT, "InternalServerError").body()
