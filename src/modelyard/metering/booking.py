"""A settlement as the ledger's row of it, without a ledger."""

import msgspec

from modelyard.domain.usage import LINE_REPEATED, MICRO_PER_UNIT, Intent, Settle, Unit, UsageRow, UsageStatus
from modelyard.policy.pricing import cost, countable, micro_units

_OF_INTENT = tuple(name for name in UsageRow.__struct_fields__ if name in Intent.__struct_fields__)
_OF_SETTLE = tuple(name for name in UsageRow.__struct_fields__ if name in Settle.__struct_fields__)
_COUNTED = (
    *("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
    *("audio_input_tokens", "audio_output_tokens", "cost_nanousd"),
)


def units_of(settle: Settle) -> int:
    """Return what is billed beside tokens, in whole millionths."""
    return micro_units(settle.units) if settle.unit else 0


def booked(intent: Intent, settle: Settle) -> UsageRow:
    """Return the row that the ledger has, or will have, of a request."""
    prompt, completion = countable(settle.prompt_tokens), countable(settle.completion_tokens)
    cached = min(countable(settle.cached_tokens), prompt)
    units = units_of(settle)
    price = intent.price if settle.price is None else settle.price
    fields = {name: getattr(intent, name) for name in _OF_INTENT}
    fields |= {name: getattr(settle, name) for name in _OF_SETTLE}
    fields |= {
        "version_id": settle.version_id or intent.version_id,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "cost_nanousd": cost(price, prompt, cached, completion, units),
        "created_at": intent.at,
        "settled_at": settle.at,
        "reasoning_tokens": min(countable(settle.reasoning_tokens), completion),
        "audio_input_tokens": min(countable(settle.audio_input_tokens), prompt),
        "audio_output_tokens": min(countable(settle.audio_output_tokens), completion),
        "batch_id": intent.batch_line.partition("/")[0],
        "units": units / MICRO_PER_UNIT,
        "unit": settle.unit if units else Unit.NONE,
    }
    return UsageRow(**fields)


def uncharged(row: UsageRow) -> UsageRow:
    """Return the row that the ledger has of a run of a line of a batch whose charge another run bears."""
    nothing = dict.fromkeys(_COUNTED, 0)
    return msgspec.structs.replace(
        row, **nothing, units=0.0, unit=Unit.NONE, status=UsageStatus.INTERRUPTED, error_code=LINE_REPEATED
    )


class UsageEvent(msgspec.Struct, frozen=True, tag="usage.request", tag_field="type"):
    """What sinks get of a request. Sent again, it is the same: whoever reads it keeps one of each ``id``."""

    id: str
    data: UsageRow
    schema: int = 1


_encode = msgspec.json.Encoder().encode


def event_of(row: UsageRow) -> tuple[bytes, bytes]:
    """Return key and value of a row's event."""
    return row.request_id.encode(), _encode(UsageEvent(row.request_id, row))
