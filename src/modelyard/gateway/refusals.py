"""What a request is told that a limit or a quota refuses, and the numbers behind it."""

from functools import partial

from modelyard import errors
from modelyard.errors import ApiError
from modelyard.gateway.answers import limit_lines
from modelyard.policy.limits import Allowance, Refusal
from modelyard.policy.money import shown
from modelyard.policy.quotas import QuotaRefusal

_WHOSE = ("this key", "the tenant", "this model")
"""Whose the allowances of a request are, in their order."""


def limited(refusal: Refusal, prompt_tokens: int, allowances: tuple[Allowance, ...], now_s: float) -> ApiError:
    """Return the refusal of a limit that time restores."""
    if refusal.retry_after_s is None:
        error = errors.request_exceeds_token_limit(prompt_tokens, refusal.limit)
    else:
        whose = _WHOSE[min(refusal.place, len(_WHOSE) - 1)]
        error = errors.rate_limited(refusal.kind, limit=refusal.limit, retry_after_s=refusal.retry_after_s, whose=whose)
    error.limits = limit_lines(allowances, now_s)
    error.facts = _facts(refusal, allowances[refusal.place], prompt_tokens)
    return error


def _facts(refusal: Refusal, allowance: Allowance, prompt_tokens: int) -> dict[str, str | int | float]:
    """Return the limit that was in the way, and how much of it was used."""
    kind, limit = refusal.kind, refusal.limit
    used: float = allowance.running
    share = allowance.concurrency_limit
    if kind == "requests":
        share = allowance.requests_limit
        used = (share or 0) - allowance.requests_left
    elif kind == "tokens":
        share = allowance.tokens_limit
        used = (share or 0) - allowance.tokens_left
    facts: dict[str, str | int | float] = {
        "whose": _WHOSE[min(refusal.place, len(_WHOSE) - 1)],
        "kind": kind,
        "limit": limit,
        "used": round(max(0.0, used), 1),
    }
    if share != limit and share is not None:
        facts["share"] = share
    if kind == "tokens":
        facts["prompt_tokens"] = prompt_tokens
    return facts


def out_of_quota(refused: QuotaRefusal, allowances: tuple[Allowance, ...], now_s: float, currency: str) -> ApiError:
    """Return the refusal of a quota, a budget or prepaid credit; amounts are in ``currency``."""
    share_left = None if refused.share is None else refused.share_left
    if not refused.kind:
        error = errors.quota_unavailable(retry_after_s=refused.retry_after_s or 1.0)
    elif refused.retry_after_s is None:
        error = errors.credit_exhausted(
            needed=refused.needed, left=refused.left, share_left=share_left, amount=partial(shown, currency=currency)
        )
        error.facts = {
            "whose": "the tenant",
            "kind": "money_prepaid",
            "limit": refused.limit,
            "used": refused.limit - refused.left,
            "needed": refused.needed,
        }
    else:
        error = errors.quota_exhausted(
            refused.kind,
            refused.period,
            is_tenants=refused.is_tenants,
            model=refused.model,
            retry_after_s=refused.retry_after_s,
            needed=refused.needed,
            left=refused.left,
            limit=refused.limit,
            amount=_tokens if refused.kind == "tokens" else partial(shown, currency=currency),
            share_left=share_left,
            fits_no_share=refused.fits_no_share,
        )
        whose = "the tenant" if refused.is_tenants else "this key"
        error.facts = {
            "whose": f"{whose} for '{refused.model}'" if refused.model else whose,
            "kind": f"{refused.kind}_per_{refused.period}",
            "limit": refused.limit,
            "used": refused.limit - refused.left,
            "needed": refused.needed,
        }
    if refused.share is not None and error.facts is not None:
        error.facts["share"] = refused.share
    error.limits = limit_lines(allowances, now_s)
    return errors.elsewhere(error) if refused.is_elsewhere else error


def _tokens(amount: int) -> str:
    return f"{amount} tokens"
