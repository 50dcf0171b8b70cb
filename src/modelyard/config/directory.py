"""Where everything of one installation lies on the disk."""

import os
from collections.abc import Mapping
from pathlib import Path

from modelyard.errors import StartupError


class DataDirectory:
    """Names of everything under the one data directory; nothing else knows the layout."""

    __slots__ = ("root",)

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def default(environment: Mapping[str, str]) -> Path:
        """Return ``$MODELYARD_DATA_DIR``, or ``modelyard`` under the user's data directory."""
        if chosen := environment.get("MODELYARD_DATA_DIR"):
            return Path(chosen).expanduser().absolute()
        base = environment.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")  # noqa: PTH111 - no Path for "~" without a home
        return Path(base) / "modelyard"

    @property
    def lock(self) -> Path:
        """Held by the running ``modelyard up``."""
        return self.root / "lock"

    @property
    def running(self) -> Path:
        """JSON ``{pid, url}`` of the running ``modelyard up``."""
        return self.root / "run" / "up.json"

    @property
    def admin_key(self) -> Path:
        """The generated admin key, mode 0600."""
        return self.root / "secrets" / "admin-key"

    @property
    def pepper(self) -> Path:
        """Key of the hash of API key secrets, mode 0600: the gateway and the controller need it."""
        return self.root / "secrets" / "pepper"

    @property
    def internal_token(self) -> Path:
        """What planes prove themselves with to each other, mode 0600."""
        return self.root / "secrets" / "internal-token"

    @property
    def provider_keys(self) -> Path:
        """Folder with one file a key of an external provider, mode 0600, that deployments name; the operator's."""
        return self.root / "secrets" / "providers"

    @property
    def control_socket(self) -> Path:
        """Unix socket of the controller's HTTP API."""
        return self.root / "run" / "control.sock"

    @property
    def feed_socket(self) -> Path:
        """Unix socket of the routing-table feed."""
        return self.root / "run" / "feed.sock"

    @property
    def last_table(self) -> Path:
        """The gateway's copy of the last routing table, mode 0600."""
        return self.root / "run" / "routing-table.msgpack"

    @property
    def database(self) -> Path:
        """SQLite database of the controller."""
        return self.root / "control.sqlite"

    @property
    def journal(self) -> Path:
        """Directory with one folder of journal segments a gateway worker."""
        return self.root / "journal"

    @property
    def artifacts(self) -> Path:
        """Content-addressed model files: ``sha256/<hex>``."""
        return self.root / "artifacts"

    @property
    def uploads(self) -> Path:
        """One folder an upload, one file a part; beside the artifacts, so that a whole one moves without a copy."""
        return self.artifacts / "uploads"

    @property
    def files(self) -> Path:
        """Contents of tenants' files, and drafts of them: ``/v1/files``, batches."""
        return self.root / "files"

    @property
    def batches(self) -> Path:
        """One folder a batch that is not over; beside the contents of files, so that its own are made by a rename."""
        return self.files / "batches"

    @property
    def batches_wanted(self) -> Path:
        """Touched with each batch that is made or cancelled: its workers look at once."""
        return self.batches / "wanted"

    def caller_socket(self, name: str) -> Path:
        """Unix socket of the gateway worker ``name`` for requests that other planes make for their owners."""
        return self.root / "run" / f"c-{name}.sock"

    @property
    def replicas(self) -> Path:
        """One folder a replica: its order, its process record, its log."""
        return self.root / "replicas"

    @property
    def logs(self) -> Path:
        """Logs of the planes: ``gateway-0.log``, ``control.log``."""
        return self.root / "logs"

    def create(self) -> None:
        """Make the directories, private to this user.

        Raises:
            StartupError: the directory cannot be made or written.
        """
        try:
            for folder in (
                "",
                "run",
                "secrets",
                "secrets/providers",
                "journal",
                "artifacts",
                "files",
                "files/batches",
                "replicas",
                "logs",
            ):
                (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            reason = "It is a file" if self.root.is_file() else error.strerror
            raise StartupError(
                f"Cannot write the data directory {self.root}: {reason}. Choose another with --data-dir."
            ) from error
