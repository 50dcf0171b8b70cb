"""How fast engines are, learned from their metrics pages as the observer reads them; one model a version."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from modelyard.domain.fleet import Replica
from modelyard.engines import EngineLoad
from modelyard.policy.engine_model import EngineModel, Look, between, learn

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

    def take(self, looked: Iterable[tuple[Replica, float, EngineLoad]], kv_tokens: int) -> None:
        """Learn from what pages said, and when; ``kv_tokens`` is how many the caches hold, 0 for unknown."""
        for replica, at_s, load in looked:
            if (look := _look(at_s, load, kv_tokens)) is None:
                continue
            before = self._watched.get(replica.id)
            if before is None or before.look.at_s > look.at_s:
                self._watched[replica.id] = _Watched(look)
            elif before.look.at_s < look.at_s:
                self._learn(replica.version_id, before, look)

    def tokens_s(self, replicas: Iterable[Replica]) -> float | None:
        """Return the tokens a second that ``replicas`` write together; None when none of them says."""
        rates = [
            watched.tokens_s
            for replica in replicas
            if (watched := self._watched.get(replica.id)) is not None and watched.tokens_s is not None
        ]
        return sum(rates) if rates else None

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget all other replicas; what their versions can do stays known."""
        kept = set(replica_ids)
        for replica_id in self._watched.keys() - kept:
            del self._watched[replica_id]

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


def _look(at_s: float, load: EngineLoad, kv_tokens: int) -> Look | None:
    if load.running is None or load.generation_tokens_total is None:
        return None
    return Look(
        at_s=at_s,
        running=load.running,
        prompt_tokens=load.prompt_tokens_total or 0.0,
        generation_tokens=load.generation_tokens_total,
        kv_tokens=(load.kv_usage or 0.0) * kv_tokens,
    )
