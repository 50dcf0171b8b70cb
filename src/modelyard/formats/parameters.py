"""How many parameters a configuration makes: for a model whose weights are not here, and for mixtures of experts.

Counts the transformers of the Llama family and those that differ from it by latent attention or by experts: embeddings,
attention, gated inner layers, norms. Others come to nearly the same; where tensors are read, their own count holds.
"""

import msgspec
from msgspec.structs import replace

from modelyard.domain.facts import ModelFacts


class Shape(msgspec.Struct, frozen=True):
    """What is needed beside the facts; 0 is not there."""

    inner: int = 0
    """Width of an inner layer."""
    is_tied: bool = False
    """The output layer is the embeddings."""
    is_gated: bool = True
    experts: int = 0
    experts_used: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """Width of the experts that every token is sent to, together."""
    dense_layers: int = 0
    """First layers without experts."""
    query_rank: int = 0
    latent_rank: int = 0
    plain_size: int = 0
    """Of a query's head, without the part that knows positions."""
    rope_size: int = 0
    value_size: int = 0
    is_bert: bool = False
    """It has biases everywhere, learned positions, and a layer that pools."""
    token_types: int = 0

    @property
    def projections(self) -> int:
        """Matrices of an inner layer."""
        return 3 if self.is_gated else 2


def with_experts(facts: ModelFacts, shape: Shape) -> ModelFacts:
    """Return ``facts`` with the parameters that compute one token, where there are experts."""
    if not (shape.experts and shape.experts_used and facts.parameters):
        return replace(facts, experts=shape.experts, experts_used=shape.experts_used)
    layers = max(facts.layers - shape.dense_layers, 0)
    idle = layers * (shape.experts - shape.experts_used) * _inner(facts, shape, shape.expert_inner or shape.inner)
    active = facts.parameters - idle
    return replace(
        facts,
        experts=shape.experts,
        experts_used=shape.experts_used,
        active_parameters=active if 0 < active < facts.parameters else 0,
    )


def count(facts: ModelFacts, shape: Shape) -> int:
    """Return the parameters of a decoder of this shape; 0 where too little is said."""
    if not (facts.layers and facts.embedding_size and facts.vocabulary and shape.inner):
        return 0
    dense = shape.dense_layers if shape.experts else facts.layers
    sparse = facts.layers - dense
    expert = _inner(facts, shape, shape.expert_inner or shape.inner)
    width = facts.embedding_size
    layer = _attention(facts, shape) + 2 * width
    experts = shape.experts * (expert + width) + _inner(facts, shape, shape.shared_inner)
    outer = facts.vocabulary * width * (1 if shape.is_tied else 2) + width
    of_bert = _of_bert(facts, shape) if shape.is_bert else 0
    return outer + facts.layers * layer + dense * _inner(facts, shape, shape.inner) + sparse * experts + of_bert


def _of_bert(facts: ModelFacts, shape: Shape) -> int:
    """Return what a BERT has beside: positions and types, biases of norms, attention and inner layers, a pooler."""
    width = facts.embedding_size
    embeddings = (facts.context_length + shape.token_types + 1) * width
    return embeddings + facts.layers * (7 * width + shape.inner) + width * (width + 1)


def _inner(facts: ModelFacts, shape: Shape, inner: int) -> int:
    return shape.projections * facts.embedding_size * inner


def _attention(facts: ModelFacts, shape: Shape) -> int:
    width, heads, size = facts.embedding_size, facts.heads, facts.head_size
    if not shape.latent_rank:
        return width * size * (2 * heads + 2 * facts.kv_heads)
    value = shape.value_size or size
    plain = shape.plain_size or size
    head = plain + shape.rope_size
    queries = shape.query_rank * (width + heads * head) if shape.query_rank else width * heads * head
    latent = width * (shape.latent_rank + shape.rope_size) + shape.latent_rank * heads * (plain + value)
    return queries + latent + heads * value * width
