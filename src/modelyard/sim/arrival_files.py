"""Requests from files that people have: Azure's and Mooncake's public traces, and any CSV or JSON lines like them.

A line says when a request came and, where it knows, how long its prompt and answer were, whose it was, and hashes of
the blocks of its prompt. What it does not say is drawn.
"""

import csv
import heapq
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from modelyard.sim.requests import Arrival
from modelyard.sim.traces import MOONCAKE_BLOCK_TOKENS
from modelyard.sim.traffic import HASH_TOKENS, REQUESTS_MAX, Traffic

TIMES = ("timestamp", "time", "created_at", "at")
PROMPTS = ("contexttokens", "input_length", "input_tokens", "prompt_tokens")
ANSWERS = ("generatedtokens", "output_length", "output_tokens", "completion_tokens")
TENANTS = ("tenant", "tenant_id")
HASHES = "hash_ids"
"""Of 512 tokens each, as Mooncake has them."""
LINE_MAX = 1024 * 1024
"""Letters of a line: a prompt of a million tokens has two thousand hashes."""
_TOKENS_MAX = 1_000_000_000
_TENANT_LENGTH_MAX = 64


class _Row(NamedTuple):
    """What a line says; 0 and nothing where it does not."""

    at_s: float
    prompt: int
    answer: int
    tenant: str
    hashes: Sequence[int]


def read(
    file: Path, traffic: Traffic, chance: random.Random, *, speedup: float = 1.0, most: int = 0, first_hash: int = 0
) -> list[Arrival]:
    """Return the requests of a file, from 0 on, ``speedup`` times as fast; what it lacks is drawn as of ``traffic``.

    Only the earliest ``most`` where that is not 0. ``first_hash`` is added to all hashes.

    Raises:
        ValueError: a line is not one; the message says which, and what one is.
        OSError: it cannot be read.
    """
    prompts, answers = random.Random(chance.random()), random.Random(chance.random())
    rows = _ordered(file, most)
    if not rows:
        raise ValueError(f"{file} has no requests")
    begin_s = rows[0].at_s
    found = []
    for row in rows:
        size = row.prompt or traffic.input_tokens.draw(prompts)
        output = row.answer or traffic.output_tokens.draw(answers)
        found.append(
            Arrival(
                at_s=traffic.begin_s + (row.at_s - begin_s) / speedup,
                prompt_tokens=size,
                output_tokens=output,
                output_max=max(traffic.output_max, output) if traffic.output_max else 0,
                tenant_id=row.tenant or traffic.tenant_id,
                weight=traffic.weight,
                band=traffic.band,
                blocks=_blocks(row.hashes, size, first_hash),
            )
        )
    return found


def azure(file: Path) -> list[Arrival]:
    """Return the requests of an Azure trace, in order, from the first: its lines say how long all are."""
    rows = _ordered(file, 0)
    return [Arrival(at_s=row.at_s - rows[0].at_s, prompt_tokens=row.prompt, output_tokens=row.answer) for row in rows]


def check(file: Path) -> None:
    """Read the first request of a file, before hours are spent on others.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    if next(_rows(file), None) is None:
        raise ValueError(f"{file} has no requests")


def _ordered(file: Path, most: int) -> list[_Row]:
    """Return the rows by time; no more of them are held than are run."""
    if most:
        return heapq.nsmallest(most, _rows(file), key=attrgetter("at_s"))
    rows: list[_Row] = []
    for row in _rows(file):
        if len(rows) == REQUESTS_MAX:
            raise ValueError(f"{file} has more than {REQUESTS_MAX:,} requests; say how many with requests = 100000")
        rows.append(row)
    rows.sort(key=attrgetter("at_s"))
    return rows


class _Lines:
    """The lines of a file, none of them endless; ``number`` is the last one's."""

    def __init__(self, file: TextIO, name: Path) -> None:
        self._file = file
        self._name = name
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            line = self._file.readline(LINE_MAX + 1)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._name} is not UTF-8 after line {self.number}") from error
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > LINE_MAX:
            raise ValueError(f"{self._name}, line {self.number} has more than {LINE_MAX:,} letters")
        return line


def _rows(file: Path) -> Iterator[_Row]:
    # Spreadsheets begin their files with a mark of the order of bytes.
    with file.open(newline="", encoding="utf-8-sig") as opened:
        lines = _Lines(opened, file)
        for cells in _cells(lines, file):
            try:
                yield _Row(
                    _time_s(cells),
                    _whole(cells, PROMPTS),
                    _whole(cells, ANSWERS),
                    _text(cells, TENANTS),
                    _hashes(cells.get(HASHES)),
                )
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{file}, line {lines.number}: {error}") from error


def _cells(lines: _Lines, file: Path) -> Iterator[Mapping[str, Any]]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        for line in chain([first], lines):
            if line.strip():
                yield _object(line, f"{file}, line {lines.number}")
        return
    try:
        names = [name.strip().lower() for name in next(csv.reader([first]), [])]
        if not set(names) & set(TIMES):
            raise ValueError(
                f"{file} has no column of times: a CSV's first line names its columns, one of them {', '.join(TIMES)}"
            )
        for cells in csv.reader(lines):
            if any(map(str.strip, cells)):
                yield dict(zip(names, cells, strict=False))
    except csv.Error as error:
        raise ValueError(f"{file}, line {lines.number} is no line of a CSV: {error}") from error


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{place} is no object; write {{"timestamp": 0, "input_tokens": 100}}')  # noqa: TRY004 - of a file
    return {str(name).lower(): value for name, value in row.items()}


def _hashes(value: Any) -> Sequence[int]:
    """Return hashes: a list of JSON lines, or a CSV's cell like ``46 47 48``."""
    if not value:
        return ()
    found = re.findall(r"-?\d+", value) if isinstance(value, str) else value
    hashes = tuple(map(int, found))
    if any(one < 0 for one in hashes):
        raise ValueError("one of its hash_ids is below 0")
    return hashes


def _blocks(hashes: Sequence[int], prompt_tokens: int, first_hash: int) -> tuple[int, ...]:
    """Return a prompt's hashes as generated traffic has them, two for one of the trace's."""
    # The last block of a prompt is seldom whole, and only whole ones are cached.
    whole = hashes[: prompt_tokens // MOONCAKE_BLOCK_TOKENS]
    parts = MOONCAKE_BLOCK_TOKENS // HASH_TOKENS
    return tuple(first_hash + parts * one + part for one in whole for part in range(parts))


def _time_s(row: Mapping[str, Any]) -> float:
    value = _first(row, TIMES)
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
        at = datetime.fromisoformat(cell.strip())
    except ValueError as error:
        raise ValueError(f"'{cell[:40]}' is no time; write seconds, or 2026-11-30T12:00:00Z") from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _whole(row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return a number of tokens, 0 where the row has none."""
    value = _first(row, names)
    if value is None:
        return 0
    try:
        tokens = float(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{str(value)[:40]}' is no number of tokens") from error
    if not 0 <= tokens <= _TOKENS_MAX:
        raise ValueError(f"{tokens:g} tokens: must be 0 to {_TOKENS_MAX:,}")
    return max(1, int(tokens))


def _text(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    value = _first(row, names)
    return "" if value is None else " ".join(str(value).split())[:_TENANT_LENGTH_MAX]


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return what the first of ``names`` has, None where it is empty."""
    for name in names:
        value = row.get(name)
        if value is not None and str(value).strip():
            return value
    return None
