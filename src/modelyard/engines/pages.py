"""Reading an engine's pages.

Of metrics only the values, only as much grammar as engines use; of models the
adapters.
"""

import contextlib
import re

import msgspec

_AWAKE = 'sleep_state="awake"'
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)
_LABELLED = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^\n]*)\}[ \t]+(\S+)", re.MULTILINE)


def read_samples(page: str) -> dict[str, float]:
    """Return the value of each metric; series of one name (several ranks, several models) are added up.

    A value that is no number is left out, so that it reads as not reported.
    """
    found: dict[str, float] = {}
    for name, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if value == value:  # noqa: PLR0124 - a NaN is no measurement
            found[name] = found.get(name, 0.0) + value
    return found


def count_of(samples: dict[str, float], name: str) -> int | None:
    """Return a gauge that counts requests, or None when the page lacks it."""
    value = samples.get(name)
    return None if value is None else int(value)


def total_of(samples: dict[str, float], *names: str) -> float | None:
    """Return the sum of several metrics, or None when the page has none of them."""
    found = [samples[name] for name in names if name in samples]
    return sum(found) if found else None


def read_labelled(page: str, name: str) -> list[tuple[str, float]]:
    """Return the labels, as they stand in the page, and the value of each series of one metric."""
    found = []
    begin = f"{name}{{"
    at = page.find(begin)
    while at >= 0:  # by its name: a page has a thousand other lines, and is read every second
        match = _LABELLED.match(page, at)
        if match is not None and match[1] == name:
            with contextlib.suppress(ValueError):
                found.append((match[2], float(match[3])))
        at = page.find(begin, at + 1)
    return found


def sleeping_on(page: str) -> bool | None:
    """Return whether vLLM's gauge of sleep says that an engine has given its memory back; None: it is not there."""
    awake = [value for labels, value in read_labelled(page, "vllm:engine_sleep_state") if _AWAKE in labels]
    return not all(awake) if awake else None


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_decode_models = msgspec.json.Decoder(_Models).decode


def adapters_on(models: str) -> frozenset[str]:
    """Return the names on a page of ``GET /v1/models`` of what has a parent, as vLLM lists adapters.

    A page that is none has none.
    """
    try:
        return frozenset(one.id for one in _decode_models(models).data if one.parent)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return frozenset()
