"""Refusals of an order whose file would be uploaded: what the upload settles is no mistake."""

import pytest

from modelyard.cli.exits import Refused
from modelyard.cli.sending import without_upload

WHAT = "This deployment cannot be made."
OURS = "model_artifact: a file of the host needs a key with the scope 'admin'"
BASE = "base: there is no version 'lama@v1'; did you mean 'llama@v1'?"


@pytest.mark.parametrize(
    ("message", "left"),
    [
        (f"{WHAT} {OURS}; {BASE}", f"{WHAT} {BASE}"),
        (f"{WHAT} {BASE}; {OURS}.", f"{WHAT} {BASE}."),
        (f"{WHAT} version: bad; {OURS}; host: bad.", f"{WHAT} version: bad; host: bad."),
        (f"{WHAT} {OURS}.", f"{WHAT} {OURS}."),
        (f"{WHAT} {BASE}", f"{WHAT} {BASE}"),
    ],
)
def test_what_an_upload_settles_is_left_out_beside_mistakes(message: str, left: str) -> None:
    error = without_upload(Refused(message, status=400, code="invalid_value", request_id="req-1"))
    assert (error.message, error.status, error.request_id) == (left, 400, "req-1")
