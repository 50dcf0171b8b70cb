"""Nodes in TOML: what is declared, the defaults, and all faults at once by name."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelyard.errors import StartupError
from modelyard.fleet.declared import GIB, Declared, load, parse

GOOD = """
[[nodes]]
id = "h100"
number = 2
pool = "large"
price = 2.5
cache = "2 TiB"
accelerators = [{ kind = "h100", count = 8, island = 4 }]

[[nodes]]
id = "mixed"
spot = true
cordoned = true
accelerators = [{ kind = "l4", count = 2 }, { kind = "own", memory = "12.5 GiB" }, { kind = "cpu", memory = "64 GiB" }]

[[nodes]]
id = "local"
price = 0.1
pool = "desk"
"""


def rows(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(f"nodes[{number}]", row) for number, row in enumerate(tomllib.loads(text)["nodes"])]


def test_a_file_declares_nodes_with_topology_and_prices(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD)
    declared = load((), file)
    assert [node.id for node in declared.nodes] == ["h100-0", "h100-1", "mixed"]
    first, mixed = declared.nodes[0], declared.nodes[2]
    assert (first.pool, first.price_nanousd, first.cache_bytes) == ("large", 2_500_000_000, 2 * 1024 * GIB)
    assert first.is_simulated
    assert len({one.island for one in first.accelerators[:4]}) == 1
    assert len({one.island for one in first.accelerators}) == 2
    assert (mixed.is_spot, mixed.is_cordoned) == (True, True)
    assert [(one.index, one.kind, one.memory_bytes / GIB) for one in mixed.accelerators] == [
        (0, "l4", 24), (1, "l4", 24), (2, "own", 12.5), (3, "cpu", 64),
    ]  # fmt: skip
    assert len({one.island for one in mixed.accelerators}) == 3
    assert (declared.local.pool, declared.local.price_nanousd) == ("desk", 100_000_000)
    assert not declared.local.is_simulated


def test_memory_has_a_default_for_kinds_that_are_known() -> None:
    for kind, gib in {"l4": 24, "a100": 80, "h100": 80, "h200": 141}.items():
        declared, faults = parse([("n", {"id": "a", "accelerators": [{"kind": kind}]})])
        assert faults == []
        assert declared.nodes[0].accelerators[0].memory_bytes == gib * GIB


def test_all_faults_are_told_at_once_by_name() -> None:
    text = """
[[nodes]]
id = "UP"
colour = "red"
spot = "yes"
price = -1
cache = "5 apples"
accelerators = [{ kind = "h100", count = 0 }, { kind = "own" }, { kind = "l4", count = 4, island = 3 }]
[[nodes]]
pool = "x y"
[[nodes]]
id = "local"
number = 2
accelerators = [{ kind = "h100" }]
"""
    _, faults = parse(rows(text))
    assert [fault.split(": ")[0] for fault in faults] == [
        "nodes[0].colour",
        "nodes[0].id",
        "nodes[0].accelerators[0].count",
        "nodes[0].accelerators[1].memory",
        "nodes[0].accelerators[2].island",
        "nodes[0].spot",
        "nodes[0].price",
        "nodes[0].cache",
        "nodes[1].id",
        "nodes[1].accelerators",
        "nodes[1].pool",
        "nodes[2].accelerators",
        "nodes[2].number",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[[nodes]]\nid = "a"\naccelerators = [{kind = "l4"}]\n[[nodes]]\nid = "a"\naccelerators = [{kind = "l4"}]',
            "'a' is declared twice",
        ),
        ('[[nodes]]\nid = "local"\n[[nodes]]\nid = "local"', "'local' is declared twice"),
        ("nodes = 3", r"tables \[\[nodes\]\]"),
        ("x = 1", r"tables \[\[nodes\]\]"),
        ("[[nodes]", "not valid TOML"),
        ('[[nodes]]\nid = "a"\nnumber = 10001\naccelerators = [{kind = "l4"}]', "whole number from 1 to 10000"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(StartupError, match=said) as refused:
        load((), file)
    assert "\n" not in str(refused.value)


def test_a_missing_file_says_so_and_none_is_needed(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"Cannot read fleet\.nodes_file .*No such file"):
        load((), tmp_path / "none.toml")
    assert load((), None) == Declared()


def test_tables_of_the_configuration_and_a_file_add_up(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD)
    declared = load([{"id": "first", "accelerators": [{"kind": "l4"}]}], file)
    assert [node.id for node in declared.nodes] == ["first", "h100-0", "h100-1", "mixed"]
