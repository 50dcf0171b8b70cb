"""Replicas that answer under another name than their endpoint's.

One that was taken from a warm pool was started before anybody knew for whom,
so it calls itself by the pool's name. Callers must see the name that they
asked for. Inside a JSON text the marks of a string are escaped, so the bytes
below can only be the field itself.
"""

_FORMS = (
    b'"model":"%b"', b'"model": "%b"',
    b'"model_name":"%b"', b'"model_name": "%b"',  # Open Inference
)  # fmt: skip


def renamed(data: bytes, before: bytes, after: bytes) -> bytes:
    """Return ``data`` with the model's name changed where an answer, an event or a request has it."""
    for form in _FORMS:
        data = data.replace(form % before, form % after, 1)
    return data


def for_engine(body: bytes, endpoint: str, engine: str) -> bytes:
    """Return a request's body as a replica wants it that calls itself ``engine``; "" is the endpoint's own name."""
    return renamed(body, endpoint.encode(), engine.encode()) if engine else body


def for_client(answer: bytes, endpoint: str, engine: str) -> bytes:
    """Return an answer as the caller wants it."""
    return renamed(answer, engine.encode(), endpoint.encode()) if engine else answer
