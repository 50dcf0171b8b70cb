"""Nodes that an operator declares in TOML, under ``[[fleet.nodes]]`` or in a file of ``[[nodes]]``.

``id = "local"`` says more of this machine: its pool, price, cache; what
accelerators it has is looked up, never declared. All other nodes are
simulated: replicas placed there are processes of this machine, and only
engines without weights may go there. They are for plans, drills and tests.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec

from modelyard.domain.nodes import Accelerator, Node
from modelyard.errors import StartupError
from modelyard.policy.hardware import GIB, KINDS

LOCAL = "local"
ACCELERATORS_MAX = 64
NODES_MAX = 10_000

_ID = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": GIB, "TiB": 1024**4}
_NODE_FIELDS = ("id", "number", "pool", "spot", "cordoned", "price", "cache", "accelerators")
_ACCELERATOR_FIELDS = ("kind", "count", "memory", "island")
_NANO = 1_000_000_000


class Declared(msgspec.Struct, frozen=True):
    """What was declared. ``local`` has no accelerators: they are found."""

    nodes: tuple[Node, ...] = ()
    local: Node = Node(LOCAL, ())


NONE = Declared()


def load(tables: Sequence[Mapping[str, Any]], file: Path | None) -> Declared:
    """Return the nodes of ``tables`` and of ``file``.

    Raises:
        StartupError: a file that cannot be read, or tables with faults; all of them are named.
    """
    rows = [(f"fleet.nodes[{number}]", row) for number, row in enumerate(tables)]
    if file is not None:
        rows += [(f"{file}: nodes[{number}]", row) for number, row in enumerate(_read(file))]
    declared, faults = parse(rows)
    if faults:
        raise StartupError(f"Bad nodes: {'; '.join(faults)}. See docs/how-to/nodes-and-accelerators.md.")
    return declared


def parse(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Declared, list[str]]:
    """Return what ``rows`` declare and every fault in them; each row comes with the name that faults call it by."""
    nodes: list[Node] = []
    local = Node(LOCAL, ())
    faults: list[str] = []
    for where, row in rows:
        reader = _Row(where, row)
        node = _node(reader)
        number = reader.whole("number", 1, most=NODES_MAX)
        faults += reader.faults
        if node.id == LOCAL:
            local = node
        elif len(nodes) + number > NODES_MAX:
            faults.append(f"{where}: more than {NODES_MAX} nodes")
        elif number == 1:
            nodes.append(node)
        else:
            nodes += [msgspec.structs.replace(node, id=f"{node.id}-{one}") for one in range(number)]
    ids = [node.id for node in nodes] + [str(row.get("id")) for _, row in rows if row.get("id") == LOCAL]
    twice = sorted({node_id for node_id in ids if ids.count(node_id) > 1}) if len(set(ids)) < len(ids) else []
    faults += [f"node '{node_id}' is declared twice" for node_id in twice[:10] if node_id]
    return Declared(tuple(nodes), local), faults


def _read(file: Path) -> list[Mapping[str, Any]]:
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise StartupError(f"Cannot read fleet.nodes_file {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"fleet.nodes_file {file} is not valid TOML: {error}.") from error
    rows = content.get("nodes")
    if set(content) != {"nodes"} or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise StartupError(f"fleet.nodes_file {file} has to consist of tables [[nodes]], and of nothing else.")
    return rows


class _Row:
    """Reads one table and keeps every fault; a bad value reads as its default."""

    def __init__(self, where: str, row: Mapping[str, Any], fields: Sequence[str] = _NODE_FIELDS) -> None:
        self.where = where
        self.row = row
        self.faults: list[str] = []
        for unknown in sorted(set(row) - set(fields)):
            self.fault(unknown, f"unknown; it takes {', '.join(fields)}")

    def fault(self, field: str, what: str) -> None:
        self.faults.append(f"{self.where}.{field}: {what}")

    def word(self, field: str, default: str, pattern: re.Pattern[str]) -> str:
        value = self.row.get(field, default)
        if isinstance(value, str) and pattern.fullmatch(value):
            return value
        self.fault(field, "needed" if value == "" else "lower-case letters, digits and '-'")
        return default

    def whole(self, field: str, default: int, *, least: int = 1, most: int) -> int:
        value = self.row.get(field, default)
        if type(value) is int and least <= value <= most:
            return value
        self.fault(field, f"a whole number from {least} to {most}")
        return default

    def flag(self, field: str) -> bool:
        value = self.row.get(field, False)
        if not isinstance(value, bool):
            self.fault(field, "true or false")
        return value is True

    def size(self, field: str, default: int) -> int:
        value = self.row.get(field, default)
        match = _SIZE.fullmatch(str(value).strip()) if type(value) in {int, str} else None
        if match is None or (match[2] is None and type(value) is not int):
            self.fault(field, 'a size like "80 GiB"')
            return default
        return int(float(match[1]) * _UNITS[match[2] or "B"])

    def dollars(self, field: str) -> int:
        value = self.row.get(field, 0)
        try:
            amount = Decimal(str(value)) if type(value) in {int, float} else Decimal(-1)
        except InvalidOperation:
            amount = Decimal(-1)
        if not amount.is_finite() or not 0 <= amount <= 100_000:
            self.fault(field, "US dollars of one accelerator for an hour, like 2.5")
            return 0
        return int(amount * _NANO)


def _node(reader: _Row) -> Node:
    node_id = reader.word("id", "", _ID)
    accelerators = _accelerators(reader, is_local=node_id == LOCAL)
    if node_id == LOCAL and "number" in reader.row:
        reader.fault("number", "this machine is one")
    return Node(
        id=node_id,
        accelerators=accelerators,
        pool=reader.word("pool", "default", _WORD),
        is_spot=reader.flag("spot"),
        is_cordoned=reader.flag("cordoned"),
        price_nanousd=reader.dollars("price"),
        cache_bytes=reader.size("cache", 0),
        is_simulated=node_id != LOCAL,
    )


def _accelerators(reader: _Row, *, is_local: bool) -> tuple[Accelerator, ...]:
    rows = reader.row.get("accelerators")
    if is_local:
        if rows is not None:
            reader.fault("accelerators", "those of this machine are found, not declared")
        return ()
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        reader.fault("accelerators", 'a list like [{kind = "h100", count = 8}]')
        return ()
    found: list[Accelerator] = []
    for number, row in enumerate(rows):
        one = _Row(f"{reader.where}.accelerators[{number}]", row, _ACCELERATOR_FIELDS)
        found += _alike(one, index_first=len(found))
        reader.faults += one.faults
    if len(found) > ACCELERATORS_MAX:
        reader.fault("accelerators", f"at most {ACCELERATORS_MAX} of a node")
    return tuple(found[:ACCELERATORS_MAX])


def _alike(reader: _Row, *, index_first: int) -> list[Accelerator]:
    kind = reader.word("kind", "", _WORD)
    count = reader.whole("count", 1, most=ACCELERATORS_MAX)
    island = reader.whole("island", count, most=ACCELERATORS_MAX)
    memory = reader.size("memory", KINDS[kind].memory_bytes if kind in KINDS else 0)
    if memory <= 0 and kind and not reader.faults:
        reader.fault("memory", f"needed: how much one of kind '{kind}' has is not known here")
    if count % island:
        reader.fault("island", f"{count} accelerators make no islands of {island}")
    # Islands of one declaration must not run into those of the one before.
    return [Accelerator(index_first + one, kind, memory, (index_first + one - one % island)) for one in range(count)]
