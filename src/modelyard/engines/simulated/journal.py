"""The token journal: what the engine did for which request, the oracle of ledger checks.

One JSON line a record, one ``write()`` a line, in append mode, so that records
survive ``kill -9`` and several engines may share a file. A token is written
down *before* it goes to the socket: nothing delivered is missing here.

``begin``  rid, path, model, stream, prompt_tokens, cached_tokens, body_keys, header_names
``token``  rid, i (choice), n (tokens so far, all choices)
``end``    rid, n, prompt_tokens, cached_tokens, finish
``abort``  rid, n, why: ``client gone`` or the fault
``adapter_loaded``, ``adapter_unloaded``  model

Every record also has ``t`` (Unix seconds), ``replica`` and ``pid``. Refused requests (4xx) leave no record.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from modelyard.clock import Clock

_encode = msgspec.json.Encoder().encode
_FIRST_BYTES = b'{"rid":'


class TokenJournal:
    """An open journal file; closes with ``close``."""

    __slots__ = ("_clock", "_file", "_pid", "_replica")

    def __init__(self, path: Path, clock: Clock, *, replica: str) -> None:
        """Open ``path``.

        Raises:
            ValueError: the file holds something else. The path may come from whoever deploys, and must not become a
                way to write into files of the machine.
        """
        self._clock = clock
        self._pid = os.getpid()
        self._replica = replica
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        start = os.pread(self._file, len(_FIRST_BYTES), 0)
        if start not in (b"", _FIRST_BYTES):
            os.close(self._file)
            raise ValueError(f"{path} is no token journal")

    def write(self, rid: str, event: str, **fields: Any) -> None:
        """Append one record."""
        record = {
            "rid": rid,
            "event": event,
            **fields,
            "t": self._clock.unix_s(),
            "replica": self._replica,
            "pid": self._pid,
        }
        os.write(self._file, _encode(record) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
