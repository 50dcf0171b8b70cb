"""Models of others, behind a small process of ours: OpenAI-compatible APIs and Anthropic's.

A replica is ``python -m modelyard.engines.providers``: it speaks what every
engine speaks, and passes requests on over TLS. So a provider has slots, is
probed, drained, metered and explained as any replica, and the key is in one
process that nothing else reads. ``engines.py`` keeps the engine contract,
``server.py`` answers, ``upstream.py`` asks, ``openai.py`` and ``anthropic.py``
say what is asked and what the answer means.
"""
