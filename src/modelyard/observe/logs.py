"""Logs: one JSON line a record, with secrets taken out.

Prompts and answers are never logged by any plane. As a second wall, every
record passes a filter that blanks what looks like an API key, a bearer token
or a key in a URL (``reference/security.md`` S34).
"""

import logging
import logging.handlers
import re
import sys
from pathlib import Path

import msgspec

FILE_BYTES_MAX = 20 * 1024 * 1024
FILES_KEPT = 5

_SECRETS = re.compile(
    r"(my_[a-km-np-z2-9]{8}_)[0-9A-Za-z_]+|((?:bearer|authorization[:=]\s*\S+)\s+)[^\s\"',]+|([?&](?:api_)?key=)[^&\s]+",
    re.IGNORECASE,
)
_encode = msgspec.json.Encoder().encode


def redact(text: str) -> str:
    """Return ``text`` with secrets replaced by ``***``; the public id of an API key stays, to find its owner."""
    return _SECRETS.sub(lambda match: f"{match[1] or match[2] or match[3]}***", text)


class JsonFormatter(logging.Formatter):
    """One redacted JSON object a line; fields given as ``extra={"request_id": …}`` are kept."""

    def __init__(self, plane: str) -> None:
        super().__init__()
        self._plane = plane

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its newline."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "plane": self._plane,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        for name in ("request_id", "endpoint_id", "replica_id", "tenant_id"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = str(value)
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return _encode(line).decode()


def setup_logging(plane: str, file: Path | None, level: str) -> None:
    """Send all logs of this process to ``file``, or to stderr when None."""
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        handler = logging.handlers.RotatingFileHandler(
            file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8"
        )
        file.chmod(0o600)
    handler.setFormatter(JsonFormatter(plane))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their INFO lines name every request and every migration step.
    for noisy in ("uvicorn.access", "alembic", "asyncio"):
        logging.getLogger(noisy).setLevel("WARNING")
