"""What all inference routes do around an answer: find its faults, journal it, count it, fail as asked."""

import asyncio

import msgspec

from modelyard.engines.http import Connection, Request
from modelyard.engines.simulated.adapters import Adapters
from modelyard.engines.simulated.answers import Token
from modelyard.engines.simulated.faults import FaultPlan, Faults, cut_directives
from modelyard.engines.simulated.forms import field_names, is_form
from modelyard.engines.simulated.generation import Accelerator, Generation, Interrupted
from modelyard.engines.simulated.requests import Refused, body_keys
from modelyard.engines.simulated.stream import EventStream
from modelyard.engines.simulated.tokens import blocks_for, split

_ERROR_TEXT = "The engine failed, as a directive asks."


class Attempts:
    """The attempts at answers of one engine process, which calls itself ``model``."""

    def __init__(self, accelerator: Accelerator, plan: FaultPlan, model: str, adapters: Adapters) -> None:
        self.accelerator = accelerator
        self.model = model
        self._adapters = adapters
        self._plan = plan

    def faults(self, prompt: str, directive: str) -> Faults:
        """Return what the request for ``prompt`` shall suffer.

        Raises:
            Refused: a directive that is none.
        """
        try:
            return self._plan.for_request(prompt, directive)
        except ValueError as error:
            raise Refused(400, str(error)) from error

    def check_model(self, model: str | None) -> str:
        """Return the model that is asked for: this process's own, or an adapter that it has.

        Raises:
            Refused: 404.
        """
        if model is None or model == self.model:
            return self.model
        if model not in self._adapters:
            raise Refused(404, f"The model `{model}` does not exist.", "NotFoundError")
        return model

    def begin(self, request: Request, plan: Generation, *, stream: bool) -> Generation:
        """Write down that the attempt ``plan`` begins.

        Raises:
            Refused: it could never fit the KV cache.
        """
        held = plan.prompt_tokens if plan.held_tokens is None else plan.held_tokens
        needed = blocks_for(held + sum(len(choice.tokens) for choice in plan.choices))
        if needed > self.accelerator.batch.blocks:
            raise Refused(400, f"The request needs {needed} KV blocks, there are {self.accelerator.batch.blocks}.")
        plan.rid = request.headers.get("x-request-id", "")
        plan.model = plan.model or self.model
        self._adapters.began(plan.model)
        self.accelerator.journal.write(
            plan.rid,
            "begin",
            path=request.path,
            model=plan.model,
            stream=stream,
            prompt_tokens=plan.prompt_tokens,
            cached_tokens=plan.cached_tokens,
            body_keys=field_names(request) if is_form(request) else body_keys(request.body),
            header_names=list(request.headers),
        )
        return plan

    async def compute(
        self, request: Request, connection: Connection, texts: list[str], model: str = ""
    ) -> Generation | None:
        """Read ``texts`` one by one for ``model``, generating nothing; None when a fault of theirs answered instead.

        The caller answers, and then says ``ended``.
        """
        lengths = [len(split(text)) for text in texts]
        context = self.accelerator.options.context_length
        if (longest := max(lengths, default=0)) > context:
            raise Refused(400, f"This model's maximum context length is {context} tokens, a text has {longest}.")
        _, directive = cut_directives(" ".join(texts))
        faults = self.faults(texts[0] if texts else "", directive)
        plan = Generation("", sum(lengths), 0, [], faults, held_tokens=longest, model=model)
        generation = self.begin(request, plan, stream=False)
        try:
            if await self.answered_wrongly(connection, faults):
                self.aborted(generation, "fault")
                return None
            await generation.run(self.accelerator, no_token)
        except Interrupted as fault:
            await self.interrupt_body(connection, generation, fault.how)
            return None
        except asyncio.CancelledError:
            self.aborted(generation, "client gone")
            raise
        return generation

    def ended(self, generation: Generation, finish: str) -> None:
        """Write down that the attempt has ended well."""
        self._adapters.ended(generation.model)
        finished = self.accelerator.totals.finished
        finished[finish] = finished.get(finish, 0) + 1
        self.accelerator.journal.write(
            generation.rid,
            "end",
            n=generation.made,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            finish=finish,
        )

    def aborted(self, generation: Generation, why: str) -> None:
        """Write down that the attempt has not ended well."""
        self._adapters.ended(generation.model)
        finished = self.accelerator.totals.finished
        finished["abort"] = finished.get("abort", 0) + 1
        self.accelerator.journal.write(generation.rid, "abort", n=generation.made, why=why)

    async def answered_wrongly(self, connection: Connection, faults: Faults) -> bool:
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

    async def interrupt_body(self, connection: Connection, generation: Generation, how: str) -> None:
        """End an answer that is not streamed as the fault asks."""
        self.aborted(generation, how)
        if how == "error":
            body = error_body(generation.faults.error_form)
            return connection.respond(500, body)
        connection.begin_sized(1000)
        connection.write(b'{"id":"chatcmpl-cut","object":"chat.com')
        return connection.close()


async def no_token(_index: int, _token: Token, _is_last: bool) -> None:  # noqa: FBT001 - the form of Emit
    """Drop the token: the body is made at the end."""


def error_body(form: str) -> bytes:
    """Return an error in one of the three forms that engines use in a stream."""
    if form == "flat":
        flat = {"object": "error", "message": _ERROR_TEXT, "type": "InternalServerError", "param": None, "code": 500}
        return msgspec.json.encode(flat)
    return Refused(500, _ERROR_TEXT, "InternalServerError").body()
