"""Logs carry no secret, whatever somebody logs."""

import json
import logging
import sys

from modelyard.ids import new_api_key
from modelyard.observe.logs import JsonFormatter, redact


def test_keys_and_bearer_tokens_are_blanked_but_the_owner_can_be_found() -> None:
    key, parts = new_api_key()
    for text in (f"got {key}", f"Authorization: Bearer {key}", f"GET /x?key={key}&a=1", "bearer abc.def"):
        seen = redact(text)
        assert parts.secret not in seen
        assert "abc.def" not in seen
    assert f"my_{parts.key_id}_***" in redact(key)


def test_a_line_is_one_json_object_with_ids_and_a_redacted_traceback() -> None:
    key, parts = new_api_key()
    try:
        raise ValueError(f"bad {key}")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, "failed %s", ("now",), sys.exc_info(), extra={"request_id": "req_1"}
        )
    line = JsonFormatter("gateway-0").format(record)
    assert parts.secret not in line
    parsed = json.loads(line)
    assert (parsed["message"], parsed["request_id"], parsed["plane"]) == ("failed now", "req_1", "gateway-0")
