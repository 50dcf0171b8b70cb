"""Orders with weights: whether the platform reads the file itself or is sent it first.

A platform on this machine reads a path of it, which costs no copy over HTTP.
One that is elsewhere, that may not read the file, or whose key may not name
files of the host, is sent the file; it then has the very bytes that are here.
"""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from modelyard.cli.exits import Refused
from modelyard.cli.http import Platform
from modelyard.cli.output import Item, remark

HERE = frozenset({"localhost", "127.0.0.1", "::1"})

_NOT_OURS = "model_artifact: a file of the host needs a key with the scope 'admin'"
_UNREADABLE = re.compile(r"model_artifact: (.*cannot be read|.*is not a regular file|a file of the host needs)")


def is_here(platform: Platform) -> bool:
    """Say whether the platform is reached on this machine; a forwarded port looks so too."""
    return urlsplit(platform.url).hostname in HERE


def send_order(
    platform: Platform, order: Item, file: Path | None, post: Callable[[Item], Item], *, is_uploading: bool
) -> Item:
    """Return the answer to ``order``; its ``file``, if any, is uploaded first when it has to be."""
    if file is None:
        return post(order)
    if not is_uploading and is_here(platform):
        try:
            return post(order)
        except Refused as error:
            # With other faults it would be refused again, after a long upload.
            is_only_that = error.message.count("; ") == 0
            if error.status != 400 or not is_only_that or not _UNREADABLE.search(error.message):
                raise without_upload(error) from error
            remark(f"The platform cannot read {file} itself; it is uploaded.")
    return post(order | {"model_artifact": upload_for(platform, file)})


def without_upload(error: Refused) -> Refused:
    """Return a refusal without what an upload would settle: that the key may not name a file of the host."""
    rest = error.message.replace(f"{_NOT_OURS}; ", "", 1)
    if rest == error.message:
        rest = rest.replace(f"; {_NOT_OURS}", "", 1)
    return Refused(rest, status=error.status, code=error.code, request_id=error.request_id)


def upload_for(platform: Platform, file: Path) -> str:
    """Upload a file, or a folder; return what an order calls it."""
    from modelyard.cli.model_upload import PARALLEL, name_of
    from modelyard.cli.uploading import upload, upload_folder

    send = upload_folder if file.is_dir() else upload
    return str(send(platform, file, name=name_of(file), parallel=PARALLEL)["uri"])
