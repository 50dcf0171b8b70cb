"""``POST /v1/models/fit``: in which precision and on which accelerators a model fits, how fast, at what price."""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from modelyard.control.api.access import missing
from modelyard.control.api.faults import Fault, check_all
from modelyard.control.api.hardware import nano, offers_of_nodes
from modelyard.control.api.registered import MODEL, age_of, reference_of
from modelyard.control.context import Context
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.facts import ModelFacts
from modelyard.domain.tenants import Identity, Scope
from modelyard.policy import fit
from modelyard.policy.fit import Row, Targets
from modelyard.policy.hardware import CPU, KINDS, Offer, offers_of_table
from modelyard.policy.precisions import Purpose
from modelyard.web.routes import AnyRoute, Call, Empty, Route

EXAMPLE = {"model": "llama@v1", "context": 8192, "concurrency": 16, "gpu": ["h100"], "itl_ms": 40}
_NUMBER_MAX = 1 << 50
_TOKENS_MAX = 10_000_000
_CONCURRENCY_MAX = 100_000


class GivenFacts(ModelFacts, frozen=True, forbid_unknown_fields=True):
    """``facts`` of a version, as someone gives them: what is no fact is refused by name and not left out."""


class FitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, and what is expected of it."""

    model: Annotated[
        str,
        msgspec.Meta(description="NAME@VERSION or NAME of the registry, a version's id, or a URI that one is from."),
    ] = ""
    facts: Annotated[
        GivenFacts | None, msgspec.Meta(description="Instead of 'model': what a header says, as 'facts' of a version.")
    ] = None
    gpu: Annotated[tuple[str, ...], msgspec.Meta(description="Only these kinds.")] = ()
    context: Annotated[
        int,
        msgspec.Meta(description="Tokens of a request, prompt and answer; 0: 4096, or the model's own if shorter."),
    ] = 0
    output_tokens: Annotated[int, msgspec.Meta(description="Those of them that are the answer.")] = 256
    concurrency: Annotated[int, msgspec.Meta(description="Requests at once.")] = 16
    itl_ms: Annotated[float, msgspec.Meta(description="Longest time between tokens; 0: any.")] = 0.0
    ttft_ms: Annotated[float, msgspec.Meta(description="Longest time to the first token; 0: any.")] = 0.0
    purpose: Annotated[Purpose, msgspec.Meta(description="What forbids to quantise.")] = Purpose.GENERAL
    fleet_only: Annotated[bool, msgspec.Meta(description="Only accelerators of this platform's nodes.")] = False


class FitView(msgspec.Struct, frozen=True, kw_only=True):
    """The adviser's answer; speeds are a roofline, not measured."""

    object: str = "model.fit"
    model: str
    parameters: int
    active_parameters: int
    kv_bytes_per_token: int
    context: int
    output_tokens: int
    concurrency: int
    rows: tuple[Row, ...]
    recommended: Row | None
    reason: str
    rules: tuple[str, ...]


class Fits:
    """The route of the adviser."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[AnyRoute]:
        """Return the declared routes."""
        path, summary = "/v1/models/fit", "Which precision and accelerators fit a model"
        types = (FitRequest, Empty, FitView)
        return [Route("POST", path, Scope.MANAGE, summary, self.fit, *types, 200, EXAMPLE, gathers=True)]

    async def fit(self, call: Call[FitRequest, Empty]) -> FitView:
        """Return every combination, and the one to take."""
        wanted = call.body
        offers = await self._offers(wanted)
        check_all("This cannot be advised on.", call.flaws, [*_faults(wanted), *_gpu_faults(wanted, offers)])
        facts: ModelFacts | None = wanted.facts
        name = wanted.model
        if facts is None:
            version = await self._version(call.identity, wanted.model)
            facts, name = version.facts, reference_of(version)
        check_all("This cannot be advised on.", [], list(_facts_faults(facts, name, wanted.context)))
        load = fit.load_of(facts, wanted.context, wanted.output_tokens, wanted.concurrency)
        targets = Targets(wanted.itl_ms, wanted.ttft_ms)
        advice = fit.advise(facts, offers, load, targets=targets, purpose=wanted.purpose)
        return FitView(
            model=name,
            parameters=facts.parameters,
            active_parameters=facts.active_parameters or facts.parameters,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            context=load.context,
            output_tokens=load.output_tokens,
            concurrency=wanted.concurrency,
            rows=advice.rows,
            recommended=advice.recommended,
            reason=advice.reason,
            rules=advice.rules,
        )

    async def _offers(self, wanted: FitRequest) -> list[Offer]:
        """Return the accelerators to look at: the fleet's with its prices, and the others of the table."""
        prices = self._context.config.fleet.accelerator_prices
        mine = offers_of_nodes(await self._context.fleet.nodes(), prices, None)
        has = {offer.kind.name for offer in mine}
        others = [] if wanted.fleet_only else [one for one in offers_of_table(nano(prices)) if one.kind.name not in has]
        return [one for one in [*mine, *others] if not wanted.gpu or one.kind.name in wanted.gpu]

    async def _version(self, identity: Identity, reference: str) -> ModelVersion:
        wanted = reference.removeprefix(MODEL)
        seen = [
            one
            for one in await self._context.store.versions(tenant_id=identity.visible_tenant)
            if wanted in (one.id, one.name, reference_of(one), one.artifact.uri)
        ]
        if not seen:
            raise missing("model", reference)
        return max(seen, key=lambda one: (one.id == wanted, one.tenant_id == identity.tenant_id, *age_of(one)))


def _faults(wanted: FitRequest) -> Iterator[Fault]:
    if bool(wanted.model) == (wanted.facts is not None):
        yield Fault("model", "give it, or 'facts' instead")
    if wanted.context != 0 and not 2 <= wanted.context <= _TOKENS_MAX:
        yield Fault("context", f"must be 2 to {_TOKENS_MAX}")
    elif not 1 <= wanted.output_tokens < (wanted.context or fit.CONTEXT):
        yield Fault("output_tokens", "must be 1 to fewer than 'context'")
    if not 1 <= wanted.concurrency <= _CONCURRENCY_MAX:
        yield Fault("concurrency", f"must be 1 to {_CONCURRENCY_MAX}")
    for name, value in (("itl_ms", wanted.itl_ms), ("ttft_ms", wanted.ttft_ms)):
        if not 0 <= value < 1e9:
            yield Fault(name, "must be 0 or more milliseconds")


def _gpu_faults(wanted: FitRequest, offers: list[Offer]) -> Iterator[Fault]:
    known = sorted(KINDS)
    for kind in wanted.gpu:
        if kind not in KINDS:
            yield Fault("gpu", f"nothing is known of '{kind[:32]}'; known: {', '.join(known)}")
        elif kind not in {offer.kind.name for offer in offers}:
            yield Fault("gpu", f"the fleet has no '{kind}'" + ("" if kind == CPU else "; leave fleet_only out"))
    if not wanted.gpu and not offers:
        yield Fault("fleet_only", "the fleet has no accelerators that anything is known of")


def _facts_faults(facts: ModelFacts, name: str, context: int) -> Iterator[Fault]:
    numbers = [value for value in msgspec.structs.astuple(facts) if type(value) is int]
    if not all(0 <= value <= _NUMBER_MAX for value in numbers):
        yield Fault("facts", "a number is below 0 or beyond any model's")
    elif facts.is_adapter:
        yield Fault("model", "it is an adapter; ask about its base")
    elif not (facts.weights_bytes or facts.parameters):
        what = f"nothing is known of the header of '{name[:100]}'" if name else "parameters or weights_bytes is needed"
        yield Fault("model" if name else "facts", f"{what}; give its file to 'modelyard fit', or deploy it first")
    elif told := fit.too_long(facts, context):
        yield Fault("context", told)
