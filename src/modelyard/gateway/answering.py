"""What a client's connection needs of whatever answers a request on it."""

from typing import Protocol


class Exchange(Protocol):
    """What answers a request; it must end by one of the connection's ``respond``, ``end_stream`` or ``abort``."""

    def client_left(self) -> None:
        """Tell that the client has gone."""
        ...

    def client_paused(self) -> None:
        """Tell that the client reads slower than it is written to."""
        ...

    def client_resumed(self) -> None:
        """Tell that the client has caught up."""
        ...
