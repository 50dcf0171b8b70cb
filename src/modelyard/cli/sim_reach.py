"""Whether prices that are to be tried are of anything that was recorded: what changes nothing is a mistake."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from modelyard.cli.exits import Exit, Failure
from modelyard.cli.sim_ledger import Case
from modelyard.domain.prices import ANY_MODEL

if TYPE_CHECKING:
    from modelyard.domain.prices import PriceEntry
    from modelyard.sim.replay_setup import Change


def check_reach(cases: Sequence[Case], changes: Sequence["Change"]) -> None:
    """Refuse prices that would change nothing.

    Raises:
        Failure: a price is of no accelerator, or of no request.
    """
    is_exact = all(change.is_price_only for change in changes)
    for change in changes:
        held = {kind for case in cases for kind in _kinds(case, change, is_exact=is_exact)}
        for kind in change.prices:
            if kind not in held:
                on = f"replicas are on {', '.join(sorted(held))}" if held else "it is not known what replicas held"
                raise Failure(f"The price of '{kind}' would change nothing: {on}.", Exit.USAGE)
        for entry in change.token_prices:
            if not any(_reaches(entry, case) for case in cases):
                name = f"{entry.model}@{entry.version}" if entry.version else entry.model
                models = sorted({one.model for case in cases for one in case.ledger.asked})
                raise Failure(
                    f"The price of '{name}' is of no request; there are requests of {', '.join(models)}.", Exit.USAGE
                )


def _kinds(case: Case, change: "Change", *, is_exact: bool) -> Iterator[str]:
    """Yield the accelerators that a price would be of; ``is_exact``: nothing is simulated."""
    if is_exact:
        yield from (life.accelerator for life in case.ledger.lives or () if life.accelerator)
    elif change.hardware or case.kind:
        yield change.hardware or case.kind


def _reaches(entry: "PriceEntry", case: Case) -> bool:
    labels = case.ledger.prices.labels
    return any(
        entry.model in (ANY_MODEL, one.model) and entry.version in ("", labels.get(one.version_id, ""))
        for one in case.ledger.asked
    )
