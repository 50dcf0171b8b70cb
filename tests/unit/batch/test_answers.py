"""Lines of output and error files have the form that OpenAI's have, and stay one line whatever an engine says."""

import json

from modelyard.batch import answers
from modelyard.domain.batches import Tokens

ANSWER = b'{"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}'


def test_an_answer_is_an_object_not_a_text() -> None:
    answer = answers.answered("batch_req_1", "mine", 200, "req_1", ANSWER)
    assert json.loads(answer.text) == {
        "id": "batch_req_1",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "req_1", "body": json.loads(ANSWER)},
        "error": None,
    }
    assert (answer.is_error, answer.tokens) == (False, Tokens(9, 0, 4, 0))


def test_an_error_has_its_response_and_its_reason() -> None:
    error = {"message": "No such model.", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    body = json.dumps({"error": error}).encode()
    answer = answers.answered("batch_req_1", "mine", 404, "req_1", body)
    line = json.loads(answer.text)
    assert line["response"] == {"status_code": 404, "request_id": "req_1", "body": json.loads(body)}
    assert line["error"] == {"code": "model_not_found", "message": "No such model."}
    assert (answer.is_error, answer.tokens) == (True, Tokens())


def test_a_line_that_nobody_ran_has_no_response() -> None:
    line = json.loads(answers.unanswered("batch_req_1", "mine", *answers.EXPIRED).text)
    assert line == {
        "id": "batch_req_1",
        "custom_id": "mine",
        "response": None,
        "error": {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        },
    }


def test_a_body_that_is_laid_out_or_no_json_stays_one_line() -> None:
    for body in (b'{\n  "a": 1\r\n}', b"<html>\nno\n</html>", b"\xff\xfe"):
        text = answers.answered("i", "c", 200, "r", body).text
        assert (b"\n" in text, b"\r" in text) == (False, False)
        json.loads(text)


def test_tokens_are_read_from_either_form_of_usage() -> None:
    details = {"input_tokens_details": {"cached_tokens": 2}, "output_tokens_details": {"reasoning_tokens": 1}}
    responses = json.dumps({"usage": {"input_tokens": 5, "output_tokens": 3, **details}}).encode()
    assert answers.tokens_of(responses) == Tokens(5, 2, 3, 1)
    assert answers.tokens_of(b'{"usage":{"prompt_tokens":8,"total_tokens":8}}') == Tokens(8)
    for odd in (b"{}", b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}', b"no"):
        assert answers.tokens_of(odd) == Tokens()


def test_the_id_of_a_line_is_always_the_same_and_of_that_line_only() -> None:
    assert answers.line_id("batch_1", 5) == answers.line_id("batch_1", 5)
    assert len({answers.line_id(batch, at) for batch in ("batch_1", "batch_2") for at in range(100)}) == 200
    assert answers.line_id("batch_1", 5).startswith("batch_req_")


def test_tokens_are_counted_as_the_ledger_does() -> None:
    empty = b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": null}}}'
    assert answers.tokens_of(empty) == Tokens(5, 0, 2, 0)
    broken = b'{"usage": {"prompt_tokens": -5, "completion_tokens": 99999999999999999999999}}'
    assert answers.tokens_of(broken) == Tokens(0, 0, 2**31 - 1, 0)
    more = b'{"usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 9}}}'
    assert answers.tokens_of(more) == Tokens(5, 5, 2, 0)
