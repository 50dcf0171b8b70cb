"""How a kept request ended, for the tests of its store and of its desk."""

import msgspec

from modelyard.domain.requests import Finish, RequestStatus


def an_end(request_id: str = "req_1", **changes: object) -> Finish:
    """Return the end of a request that succeeded, with ``changes``."""
    end = Finish(
        id=request_id,
        status=RequestStatus.SUCCEEDED,
        http_status=200,
        content_type="application/json",
        answer=b'{"a":1}',
    )
    return msgspec.structs.replace(end, **changes)
