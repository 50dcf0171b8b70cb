"""How fast engines are, learned from their metrics pages as somebody reads them; one model a version."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from modelyard.policy.engine_model import EngineModel, Look, Speed, between, learn

_NEWEST = 0.3
"""Weight of the newest rate of tokens: a page that was read in a pause says little."""


@dataclass(slots=True)
class _Watched:
    """The last reading of one replica; ``tokens_s`` is what it wrote of late."""

    look: Look
    tokens_s: float | None = None


@dataclass(slots=True)
class Speeds:
    """Engine models by version, and rates of tokens by replica."""

    models: dict[str, EngineModel] = field(default_factory=dict)
    _watched: dict[str, _Watched] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Speeds of {len(self.models)} versions, {len(self._watched)} replicas>"

    def take(self, replica_id: str, version_id: str, look: Look) -> None:
        """Learn from what a replica's page said."""
        before = self._watched.get(replica_id)
        if before is None or before.look.at_s > look.at_s:
            self._watched[replica_id] = _Watched(look)
        elif before.look.at_s < look.at_s:
            self._learn(version_id, before, look)

    def tokens_s(self, replica_ids: Iterable[str]) -> float | None:
        """Return the tokens a second that these replicas write together; None when none of them says."""
        rates = [
            watched.tokens_s
            for replica_id in replica_ids
            if (watched := self._watched.get(replica_id)) is not None and watched.tokens_s is not None
        ]
        return sum(rates) if rates else None

    def known(self) -> Iterator[tuple[str, Speed]]:
        """Yield the versions of which enough was seen, with their speeds."""
        for version_id, model in self.models.items():
            if model.is_known:
                yield version_id, model.speed

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget all other replicas; what their versions can do stays known."""
        kept = set(replica_ids)
        for replica_id in self._watched.keys() - kept:
            del self._watched[replica_id]

    def forget(self, versions: Container[str]) -> None:
        """Forget what is known of all other versions: they were removed."""
        for version_id in [one for one in self.models if one not in versions]:
            del self.models[version_id]

    def _learn(self, version_id: str, watched: _Watched, look: Look) -> None:
        sample = between(watched.look, look)
        if sample is not None:
            self.models[version_id] = learn(self.models.get(version_id, EngineModel()), sample)
        span_s = look.at_s - watched.look.at_s
        wrote = look.generation_tokens - watched.look.generation_tokens
        if wrote >= 0:
            rate = wrote / span_s
            before = watched.tokens_s
            watched.tokens_s = rate if before is None else before + _NEWEST * (rate - before)
        watched.look = look
