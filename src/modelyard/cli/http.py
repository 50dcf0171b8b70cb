"""The command line's HTTP: one small client over urllib3.

It finds the platform (``--url``/``--key``, ``MODELYARD_URL``/``MODELYARD_API_KEY``,
or the data directory of the running ``modelyard up``), turns every error object into
a ``Refused`` with the request id, and reads streams line by line.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import click
import msgspec

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.output import Item, clean
from modelyard.cli.running import read_running
from modelyard.config import DataDirectory

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 600.0
"""Longest silence of a stream; the gateway's loading comments come every two seconds."""
PAGE = 100
_NAMES_MAX = 5


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which platform to talk to; the command gets a ``Platform`` as ``platform``."""
    return _finding(command, lambda find: {"platform": find()})


def connectable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options to a command that may do without; it gets ``find``, which returns the ``Platform``."""
    return _finding(command, lambda find: {"find": find})


def _finding(
    command: Callable[..., Any], given: Callable[[Callable[[], "Platform"]], dict[str, Any]]
) -> Callable[..., Any]:
    def with_platform(*args: Any, url: str | None, key: str | None, data_dir: str | None, **options: Any) -> Any:
        return command(*args, **given(lambda: find_platform(url=url, key=key, data_dir=data_dir)), **options)

    with_platform.__name__ = command.__name__
    with_platform.__doc__ = command.__doc__
    with_platform.__dict__.update(command.__dict__)
    for option in reversed(
        [
            click.option("--url", metavar="URL", help="The platform's address [env: MODELYARD_URL]."),
            click.option("--key", metavar="KEY", help="API key [env: MODELYARD_API_KEY]."),
            data_dir_option,
        ]
    ):
        with_platform = option(with_platform)
    return with_platform


data_dir_option = click.option(
    "--data-dir", metavar="DIR", help="Data directory of the platform on this machine [env: MODELYARD_DATA_DIR]."
)


def data_directory(data_dir: str | None) -> DataDirectory:
    """Return the data directory that is meant."""
    root = Path(data_dir).expanduser().absolute() if data_dir else DataDirectory.default(os.environ)
    return DataDirectory(root)


def find_platform(*, url: str | None, key: str | None, data_dir: str | None) -> "Platform":
    """Return the platform that is meant, from options, environment or the data directory."""
    url = url or (None if data_dir else os.environ.get("MODELYARD_URL"))
    key = key or (None if data_dir else os.environ.get("MODELYARD_API_KEY"))
    data = data_directory(data_dir)
    certificate = ""
    if url is None:
        running = read_running(data)
        if running is None:
            raise Failure(
                f"No platform runs in {data.root}. Start it with 'modelyard up', or name one with --url and --key.",
                Exit.UNAVAILABLE,
            )
        if not running.url:
            raise Failure(f"The platform in {data.root} is still starting. Try again in a second.", Exit.UNAVAILABLE)
        url, certificate = running.url, running.certificate
        key = key or _admin_key(data)
    if not url.startswith(("http://", "https://")):
        raise Failure(f"Bad --url '{url}': it must begin with http:// or https://.", Exit.USAGE)
    if key is None:
        raise Failure("No API key for this address. Give --key, or set MODELYARD_API_KEY.", Exit.AUTH)
    return Platform(url=url.rstrip("/").removesuffix("/v1"), key=key, certificate=certificate)


def _admin_key(data: DataDirectory) -> str | None:
    try:
        return data.admin_key.read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure(f"Cannot read {data.admin_key}: {error.strerror}. Give --key instead.", Exit.AUTH) from error


@dataclass(slots=True)
class Platform:
    """A running Modelyard. ``certificate`` is a file to trust, of a platform on this machine that speaks TLS."""

    url: str
    key: str
    certificate: str = ""

    def get(self, path: str, **query: object) -> Any:
        """Return the JSON that GET answers."""
        return self._json("GET", path, None, query)

    def post(self, path: str, body: Item) -> Any:
        """Return the JSON that POST answers."""
        return self._json("POST", path, body, {})

    def put_json(self, path: str, body: Item) -> Any:
        """Return the JSON that PUT of a body answers."""
        return self._json("PUT", path, body, {})

    def patch(self, path: str, body: Item) -> Any:
        """Return the JSON that PATCH answers."""
        return self._json("PATCH", path, body, {})

    def put(self, path: str, content: IO[bytes], size: int, headers: dict[str, str]) -> Any:
        """Return the JSON that PUT answers; ``content`` is read while it is sent, and has ``size`` bytes."""
        return self.send("PUT", path, content, size, {"content-type": "application/octet-stream", **headers})

    def send(self, method: str, path: str, content: IO[bytes], size: int, headers: dict[str, str]) -> Any:
        """Return the JSON that a method answers; ``content`` is read while it is sent, and has ``size`` bytes."""
        sent = {"content-length": str(size), **headers}
        with self._exchange(method, self.url + path, content, sent, timeout_s=READ_TIMEOUT_S) as response:
            return msgspec.json.decode(response.read())

    @contextmanager
    def download(self, path: str) -> Iterator["BaseHTTPResponse"]:
        """Open an answer that is read while it comes, with its headers; what breaks off is a failure."""
        with self._open("GET", path, None, {}, timeout_s=READ_TIMEOUT_S) as response:
            yield response

    def delete(self, path: str) -> Any:
        """Return the JSON that DELETE answers, or None."""
        return self._json("DELETE", path, None, {})

    def all(self, path: str, **query: object) -> list[Item]:
        """Return every item of a list, page after page."""
        items: list[Item] = []
        while True:
            page = self.get(path, **query)
            items += page["data"]
            if not page.get("has_more") or not page["data"]:
                return items
            query["after"] = page["data"][-1]["id"]

    def text(self, path: str, **query: object) -> str:
        """Return the text that GET answers."""
        with self._open("GET", path, None, query, timeout_s=READ_TIMEOUT_S) as response:
            return response.read().decode("utf-8", "replace")

    @contextmanager
    def lines(self, method: str, path: str, body: Item | None, **query: object) -> Iterator[Iterator[str]]:
        """Open a stream and give its lines, each as soon as it is there."""
        with self._open(method, path, body, query, timeout_s=STREAM_TIMEOUT_S) as response:
            yield _lines(response, self)

    @contextmanager
    def pieces(self, path: str, **query: object) -> Iterator[Iterator[bytes]]:
        """Open what GET answers and give it piece by piece; one that is cut off fails."""
        with self._open("GET", path, None, query, timeout_s=STREAM_TIMEOUT_S) as response:
            yield _pieces(response, self)

    def _json(self, method: str, path: str, body: Item | None, query: dict[str, object]) -> Any:
        with self._open(method, path, body, query, timeout_s=READ_TIMEOUT_S) as response:
            content = response.read()
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.DecodeError as error:
            raise Failure(f"{self.url} did not answer as a Modelyard does ({error}). Check --url.") from error

    @contextmanager
    def _open(
        self, method: str, path: str, body: Item | None, query: dict[str, object], *, timeout_s: float
    ) -> Iterator["BaseHTTPResponse"]:
        url = self.url + path
        if given := {name: str(value) for name, value in query.items() if value is not None}:
            url += "?" + urlencode(given)
        headers: dict[str, str] = {}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = msgspec.json.encode(body)
        with self._exchange(method, url, content, headers, timeout_s=timeout_s) as response:
            yield response

    @contextmanager
    def _exchange(
        self, method: str, url: str, content: bytes | IO[bytes] | None, headers: dict[str, str], *, timeout_s: float
    ) -> Iterator["BaseHTTPResponse"]:
        import urllib3

        mine = {"authorization": f"Bearer {self.key}", "user-agent": "modelyard-cli", "accept-encoding": "identity"}
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s)
        with urllib3.PoolManager(retries=False, timeout=timeout, **self._trust()) as pool:
            try:
                response = pool.request(
                    method, url, body=content, headers={**mine, **headers}, preload_content=False, redirect=False
                )
            except urllib3.exceptions.HTTPError as error:
                raise self.unreachable(error) from error
            try:
                if response.status >= 300:
                    raise _refusal(response)
                yield response
            except urllib3.exceptions.HTTPError as error:
                raise self.unreachable(error) from error
            finally:
                response.close()

    def _trust(self) -> dict[str, Any]:
        if not self.certificate:
            return {}
        from modelyard.gateway.tls import trusting

        try:
            return {"ssl_context": trusting(self.certificate), "assert_hostname": False}
        except OSError as error:
            raise Failure(f"Cannot use the certificate {self.certificate}: {error}.") from error

    def unreachable(self, error: Exception) -> Failure:
        """Return the failure to report for a transport error of urllib3."""
        kind = type(error).__name__
        reason = {
            "NewConnectionError": "connection refused",
            "ConnectTimeoutError": "no connection in time",
            "ReadTimeoutError": "no answer in time",
            "NameResolutionError": "unknown host name",
        }.get(kind, "connection lost" if "Protocol" in kind or "Incomplete" in kind else f"{kind}: {error}")
        return Failure(
            f"Cannot reach {self.url}: {reason}. Is it running? 'modelyard up' starts it; --url names another.",
            Exit.UNAVAILABLE,
        )


def _refusal(response: "BaseHTTPResponse") -> Refused:
    content = response.read()
    request_id = response.headers.get("x-request-id")
    message, code = f"HTTP {response.status} {response.reason or ''}".rstrip() + ".", None
    try:
        detail = msgspec.json.decode(content)["error"]
        message, code = str(detail["message"]), detail.get("code")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        pass  # not ours: the status line has to do
    message = clean(message).replace("\n", " ")
    return Refused(message, status=response.status, code=code, request_id=clean(request_id) if request_id else None)


def _lines(response: "BaseHTTPResponse", platform: Platform) -> Iterator[str]:
    import urllib3

    rest = b""
    try:
        for piece in response.stream(65_536):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r").decode("utf-8", "replace")
    except urllib3.exceptions.HTTPError as error:
        raise platform.unreachable(error) from error
    if rest:
        yield rest.decode("utf-8", "replace")


def _pieces(response: "BaseHTTPResponse", platform: Platform) -> Iterator[bytes]:
    import urllib3

    try:
        yield from response.stream(65_536)
    except urllib3.exceptions.HTTPError as error:
        raise platform.unreachable(error) from error


def segment(text: str) -> str:
    """Return ``text`` as one segment of a path."""
    return quote(text, safe="")


def close_names(wanted: str, names: list[str]) -> str:
    """Return ``Did you mean 'x'?`` for a name that nearly exists, else what there is."""
    import difflib

    close = difflib.get_close_matches(wanted, names, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    if names:
        more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
        return f"There is: {', '.join(sorted(names)[:_NAMES_MAX])}{more}."
    return "Nothing is deployed yet; see 'modelyard deploy --help'."


def ask_of(platform: Platform, name: str, ask: Callable[[str], T], path: str) -> T:
    """Return what ``ask(path)`` does of the endpoint called ``name``; where there is none, say which there are.

    Raises:
        Refused: the platform did.
    """
    try:
        return ask(path)
    except Refused as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        names = [endpoint["name"] for endpoint in platform.all("/v1/endpoints", limit=PAGE)]
        raise error.with_hint(close_names(name, names)) from error
