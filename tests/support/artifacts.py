"""Artifact stores for tests, and what is on their disk."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from modelyard.config import FetchConfig
from modelyard.control.artifacts import ArtifactStore, Sources
from modelyard.control.artifacts.disk import Disk
from modelyard.domain.endpoints import Stage
from modelyard.policy.addresses import networks
from modelyard.web.fetcher import Fetcher, trust

HERE = ("127.0.0.1/32",)
NOW_S = 1_800_000_000.0


async def to_here(host: str, port: int) -> Sequence[str]:
    """Resolve every name to 127.0.0.1."""
    return ["127.0.0.1"]


def open_sources(config: FetchConfig, now_s: Callable[[], float] = lambda: NOW_S) -> Sources:
    """Return the sources of a configuration, as ``compose`` makes them, but every name is this machine."""
    fetcher = Fetcher(networks(config.private_networks), tls=trust(config.ca_file), resolve=to_here)
    return Sources(fetcher, config, now_s=now_s)


def open_store(root: Path, config: FetchConfig | None = None, *, disk: Disk | None = None) -> ArtifactStore:
    """Return a store; it may reach 127.0.0.1 and no other address of ours."""
    settings = config or FetchConfig(private_networks=HERE, part_bytes=64 * 1024, parallel=3)
    return ArtifactStore(root, open_sources(settings), disk=disk)


def digest_of(content: bytes) -> str:
    """Return the digest of ``content``."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def files_in(root: Path, *folders: str) -> list[Path]:
    """Return all files of a store, or of some of its folders."""
    roots = [root / folder for folder in folders] or [root]
    return sorted(path for one in roots for path in one.rglob("*") if path.is_file())


def accept(place: Path) -> None:
    """Take any file, as an engine that is not picky."""


def gguf_only(place: Path) -> None:
    """Take files that begin as GGUF files do."""
    with place.open("rb") as reader:
        if reader.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")


def ignore(stage: Stage, done: int, whole: int) -> None:
    """Take note of no progress."""
