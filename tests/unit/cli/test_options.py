"""What holds for the options of all commands."""

from collections import Counter
from collections.abc import Iterator

import click
import pytest

from modelyard.cli.main import cli


def commands(group: click.Group, context: click.Context, *words: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None, name
        if isinstance(found, click.Group):
            yield from commands(found, context, *words, name)
        yield " ".join((*words, name)), found


COMMANDS = dict(commands(cli, click.Context(cli)))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_two_options_are_one_value(name: str) -> None:
    """``--of-key`` was once kept where ``--key`` is, so that a budget was made for somebody else."""
    counts = Counter(one.name for one in COMMANDS[name].params)
    assert [word for word, times in counts.items() if times > 1] == []
