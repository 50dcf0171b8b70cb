"""Server-sent events, taken apart as their bytes come."""


class EventReader:
    """Gives the data of each event that is whole; comments and other fields are left out."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that ``piece`` ends."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        found: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")  # noqa: PLW2901 - the same line without its end
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found
