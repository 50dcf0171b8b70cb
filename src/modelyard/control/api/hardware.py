"""Hardware for a deployment that names none: what the adviser takes of the fleet."""

from collections.abc import Mapping, Sequence

from modelyard.control.api.deploy_spec import Hardware, HardwareBody
from modelyard.control.api.versions import Findings
from modelyard.control.context import Context
from modelyard.domain.facts import ModelFacts
from modelyard.domain.nodes import NodeSeen
from modelyard.engines import Engine, Settings
from modelyard.policy.fit import advise, cheapest
from modelyard.policy.hardware import CPU, Offer, offers_of_fleet
from modelyard.policy.roofline import Load

PLAIN = Hardware(CPU, 1)
_CONCURRENCY = 8
_CONTEXT = 4096
"""What is expected of a replica: an engine with pages does not hold every slot at its full length."""
_OUTPUT = 256


def choose_hardware(
    asked: HardwareBody,
    findings: Findings,
    facts: ModelFacts,
    nodes: Sequence[NodeSeen],
    prices: Mapping[str, float],
) -> Hardware:
    """Return the accelerators of a replica: those that were asked for, and what was left out as the adviser has it.

    Without GPUs, or with an engine that computes on none, that is one CPU, as it is where nothing is known of a model.
    """
    plain = Hardware(asked.gpu_type or PLAIN.gpu_type, PLAIN.gpu_count if asked.gpu_count is None else asked.gpu_count)
    is_whole = asked.gpu_type is not None and asked.gpu_count is not None
    engine, settings = findings.engine, findings.settings
    if is_whole or findings.registered is not None or engine is None or settings is None:
        return plain
    if not engine.computes_on_gpus or not facts.weights_bytes or asked.gpu_type == CPU:
        return plain
    offers = [
        offer
        for offer in offers_of_nodes(nodes, prices, engine)
        if offer.kind.name != CPU and asked.gpu_type in (None, offer.kind.name)
    ]
    return _advised(asked, facts, settings, offers) if offers else plain


async def known_facts(context: Context, findings: Findings) -> ModelFacts:
    """Return what is known of an order's artifact: of one that is elsewhere, what an earlier version of it told."""
    source = findings.source
    if source.facts.weights_bytes or not source.uri:
        return source.facts
    versions = await context.store.versions()
    return next(
        (one.facts for one in versions if one.artifact.uri == source.uri and one.facts.weights_bytes), source.facts
    )


def offers_of_nodes(nodes: Sequence[NodeSeen], prices: Mapping[str, float], engine: Engine | None) -> list[Offer]:
    """Return what the fleet has; an engine with weights runs on nodes only that are more than declared."""
    is_real_only = engine is not None and engine.needs_artifact
    usable = [seen.node for seen in nodes if not (is_real_only and seen.node.is_simulated)]
    return offers_of_fleet(usable, nano(prices))


def nano(prices: Mapping[str, float]) -> dict[str, int]:
    """Return configured prices in nano-dollars."""
    return {kind: round(price * 1e9) for kind, price in prices.items()}


def _advised(asked: HardwareBody, facts: ModelFacts, settings: Settings, offers: Sequence[Offer]) -> Hardware:
    context = min(settings.context_length, _CONTEXT)
    output = min(_OUTPUT, max(1, context // 2))
    load = Load(max(1, min(settings.slots, _CONCURRENCY)), context - output, output)
    advice = advise(facts, offers, load, is_fixed=True)
    memory = {offer.kind.name: offer.memory_bytes for offer in offers}
    able = [
        row
        for row in advice.rows
        if asked.gpu_count in (None, row.count)
        and settings.memory_bytes <= row.count * memory[row.kind]
        and (not facts.kv_bytes_per_token or row.kv_tokens_max >= settings.context_length)
    ]
    row = cheapest(able, is_tight_fine=True)
    plain = Hardware(asked.gpu_type or PLAIN.gpu_type, PLAIN.gpu_count if asked.gpu_count is None else asked.gpu_count)
    if row is None:
        kinds = ", ".join(sorted(memory))
        why = advice.reason if advice.recommended is None else f"a context of {settings.context_length:,} is too long"
        return Hardware(plain.gpu_type, plain.gpu_count, f"no GPU of the fleet ({kinds}) was chosen: {why}")
    what = f"{row.count} x {row.kind}"
    reason = (
        f"no hardware was named: {what} is the cheapest of the fleet that holds the model, at about "
        f"${row.usd_per_million_output:.2f} a million output tokens (${row.usd_per_hour:.2f} an hour)"
    )
    return Hardware(row.kind, row.count, reason)
