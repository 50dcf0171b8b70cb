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
    uri = base.artifact.uri
    own = [_plain(base.facts.name), _plain(uri.rpartition("/")[2].rpartition(".")[0])]
    # What somebody called it, or the folder, may be a part of many names ("llama", "model").
    given = [_plain(one) for one in (base.name, *uri.split("/"))]
    is_alike = any(len(one) >= _SHORTEST and one in mine for one in own) or any(mine in one for one in (*own, *given))
    if len(mine) < _SHORTEST or not (base.facts.name or uri) or is_alike:
        return ""
    known = base.facts.name or base.artifact.uri.rpartition("/")[2]
    return (
        f"it names the base '{said[:200]}', and is loaded onto '{base.name}@{base.version}' ({known[:200]}): "
        "make sure that they are the same model"
    )


def _plain(name: str) -> str:
    return _NOT_LETTERS.sub("", name.lower())
