"""Hooks that schemathesis loads into its own process: requests that can be answered, and a count of what was.

The specifications name their makers' models and allow what is refused here or was
never meant (an empty list of tools), so nearly all of what they lead to would end
at the first check. Seven of eight requests are therefore turned towards what
is offered; the eighth stays as it was made.
"""

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

MODELS: dict[str, str] = json.loads(os.environ["FUZZ_MODELS"])
"""Which model answers on a path."""
NOT_OFFERED = {
    "/chat/completions": ("audio", "prediction", "web_search_options", "moderation"),
    "/responses": ("prompt", "conversation", "previous_response_id", "background", "moderation"),
    "/v1/messages": ("container", "mcp_servers", "context_management", "inference_geo"),
    "/v1/messages/count_tokens": ("mcp_servers", "context_management"),
}
MESSAGES = [{"role": "user", "content": "hello big world"}]
SIMPLE: dict[str, dict[str, Any]] = {
    "/chat/completions": {"model": "", "messages": MESSAGES},
    "/completions": {"model": "", "prompt": "once upon a time"},
    "/embeddings": {"model": "", "input": "hello"},
    "/moderations": {"model": "", "input": "hello"},
    "/responses": {"model": "", "input": "hello"},
    "/v1/messages": {"model": "", "max_tokens": 20, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "", "messages": MESSAGES},
    "/v2/rerank": {"model": "", "query": "hello", "documents": ["hello", "world"]},
}
"""The simplest request of each path."""
ESSENCE: dict[str, tuple[str, Any]] = {
    "/completions": ("prompt", "once upon a time"),
    "/responses": ("input", "hello"),
}
"""What a request cannot do without here, where the specification lets it be absent."""
SERVED_TOOLS: dict[str, tuple[Any, ...]] = {
    "/chat/completions": ("function",),
    "/responses": ("function",),
    "/v1/messages": (None, "custom"),
    "/v1/messages/count_tokens": (None, "custom"),
}
"""Types of tools that run at the caller; others run on their maker's servers."""
answers: Counter[tuple[str, int]] = Counter()
made: Counter[str] = Counter()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Turn seven of eight requests towards what is offered."""
    path, body = case.operation.path, case.body
    if path not in MODELS or not isinstance(body, dict):
        return
    made[path] += 1
    if made[path] % 8 == 0:
        return
    if made[path] == 1:  # one that is surely answered, however short the run
        for name in set(body) - {"model"}:
            del body[name]
        body.update(SIMPLE[path])
    if isinstance(body.get("model"), str) or path == "/responses":
        body["model"] = MODELS[path]
    for name in NOT_OFFERED.get(path, ()):
        body.pop(name, None)
    if path in SERVED_TOOLS and isinstance(body.get("tools"), list):
        served = [tool for tool in body["tools"] if isinstance(tool, dict) and tool.get("type") in SERVED_TOOLS[path]]
        body["tools"] = served or None
    name, value = ESSENCE.get(path, ("", None))
    if name and body.get(name) is None:
        body[name] = value


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count the answer."""
    answers[case.operation.path, response.status_code] += 1


@atexit.register
def tell() -> None:
    """Write the counts where the test reads them."""
    counts = [[path, status, count] for (path, status), count in answers.items()]
    Path(os.environ["FUZZ_ANSWERS"]).write_text(json.dumps(counts))
