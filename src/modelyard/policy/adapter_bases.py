"""Whether an adapter was trained on the base that it is loaded onto, by the names that both have.

Shapes are compared by engines, and many models share theirs: an adapter of
another one of the same shape loads, and answers nonsense. Names may differ
for good reasons (a copy, another precision), so that this doubts and refuses
nothing.
"""

import re

from modelyard.domain.catalog import ModelVersion
from modelyard.domain.facts import ModelFacts

_SHORTEST = 3
_NOT_LETTERS = re.compile(r"[^a-z0-9]+")


def doubt_of_base(adapter: ModelFacts, base: ModelVersion) -> str:
    """Return why ``adapter`` may be for another model than ``base``; "" where the names agree, or one has none."""
    said = adapter.adapter_base
    if not said:
        return ""
    mine = _plain(said.rstrip("/").rpartition("/")[2])
    names = [_plain(one) for one in (base.facts.name, base.name, *base.artifact.uri.split("/"))]
    theirs = [one for one in names if len(one) >= _SHORTEST]
    is_named = bool(base.facts.name or base.artifact.uri)
    if len(mine) < _SHORTEST or not is_named or any(mine in one or one in mine for one in theirs):
        return ""
    known = base.facts.name or base.artifact.uri.rpartition("/")[2]
    return (
        f"it names the base '{said[:200]}', and is loaded onto '{base.name}@{base.version}' ({known[:200]}): "
        "make sure that they are the same model"
    )


def _plain(name: str) -> str:
    return _NOT_LETTERS.sub("", name.lower())
