"""Requests from files that people have: Azure's and Mooncake's public traces, and any CSV or JSON lines like them.

A line says when a request came and, where it knows, how long its prompt and answer were, whose it was, and hashes of
the blocks of its prompt. What it does not say is drawn.
"""

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from modelyard.sim.requests import Arrival
from modelyard.sim.traces import MOONCAKE_BLOCK_TOKENS
from modelyard.sim.traffic import HASH_TOKENS, REQUESTS_MAX, Traffic

TIMES = ("timestamp", "time", "created_at", "at")
PROMPTS = ("contexttokens", "input_length", "input_tokens", "prompt_tokens")
ANSWERS = ("generatedtokens", "output_length", "output_tokens", "completion_tokens")
TENANTS = ("tenant", "tenant_id")
HASHES = "hash_ids"
"""Of 512 tokens each, as Mooncake has them."""


def read(file: Path, traffic: Traffic, chance: random.Random, *, speedup: float = 1.0) -> list[Arrival]:
    """Return the requests of a file, from 0 on, ``speedup`` times as fast; what it lacks is drawn as of ``traffic``.

    Raises:
        ValueError: a line is not one; the message says which, and what one is.
        OSError: it cannot be read.
    """
    rows = []
    with file.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(_rows(lines, file), 1):
            if number > REQUESTS_MAX:
                raise ValueError(f"{file} has more than {REQUESTS_MAX:,} requests; take a part of it")
            try:
                rows.append((_time_s(row), _whole(row, PROMPTS), _whole(row, ANSWERS), _text(row, TENANTS), row))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{file}, request {number}: {error}") from error
    if not rows:
        raise ValueError(f"{file} has no requests")
    rows.sort(key=lambda one: one[0])
    begin_s = rows[0][0]
    found = []
    for at_s, prompt, answer, tenant, row in rows:
        size = prompt or traffic.input_tokens.draw(chance)
        output = answer or traffic.output_tokens.draw(chance)
        found.append(
            Arrival(
                at_s=traffic.begin_s + (at_s - begin_s) / speedup,
                prompt_tokens=size,
                output_tokens=output,
                output_max=max(traffic.output_max, output) if traffic.output_max else 0,
                tenant_id=tenant or traffic.tenant_id,
                weight=traffic.weight,
                band=traffic.band,
                blocks=_blocks(row.get(HASHES) or (), size),
            )
        )
    return found


def _rows(lines: Iterator[str], file: Path) -> Iterator[Mapping[str, Any]]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        for number, line in enumerate(chain([first], lines), 1):
            if line.strip():
                yield _object(line, f"{file}, line {number}")
        return
    names = [name.strip().lower() for name in next(csv.reader([first]), [])]
    if not set(names) & set(TIMES):
        raise ValueError(
            f"{file} has no column of times: a CSV's first line names its columns, one of them {', '.join(TIMES)}"
        )
    for cells in csv.reader(lines):
        if cells:
            yield dict(zip(names, cells, strict=False))


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{place} is no object; write {{"timestamp": 0, "input_tokens": 100}}')  # noqa: TRY004 - of a file
    return {str(name).lower(): value for name, value in row.items()}


def _blocks(hashes: Sequence[int], prompt_tokens: int) -> tuple[int, ...]:
    """Return a prompt's hashes as generated traffic has them, two for one of the trace's."""
    # The last block of a prompt is seldom whole, and only whole ones are cached.
    whole = hashes[: prompt_tokens // MOONCAKE_BLOCK_TOKENS]
    parts = MOONCAKE_BLOCK_TOKENS // HASH_TOKENS
    return tuple(parts * int(one) + part for one in whole for part in range(parts))


def _time_s(row: Mapping[str, Any]) -> float:
    value = next((row[name] for name in TIMES if row.get(name) not in (None, "")), None)
    if value is None:
        raise ValueError(f"it has no time; name it {' or '.join(TIMES)}")
    # JSON lines have milliseconds, as Mooncake's do.
    at_s = value / 1000 if isinstance(value, int | float) else _seconds(str(value))
    if not math.isfinite(at_s):
        raise ValueError("its time is not a finite number")
    return at_s


def _seconds(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        pass
    try:
        # Azure writes seven digits of a second, one more than Python reads.
        at = datetime.fromisoformat(cell.strip()[:26] if "." in cell else cell.strip())
    except ValueError as error:
        raise ValueError(f"'{cell[:40]}' is no time; write seconds, or 2026-11-30T12:00:00Z") from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _whole(row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return a number of tokens, 0 where the row has none."""
    value = next((row[name] for name in names if row.get(name) not in (None, "")), None)
    return max(1, int(float(value))) if value is not None else 0


def _text(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((str(row[name]) for name in names if row.get(name)), "")
