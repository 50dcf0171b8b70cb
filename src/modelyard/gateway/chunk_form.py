"""The form of a stream's chunks: one that differs from the last in its text only need not be looked through again.

To look through a chunk of a token for all that may matter (usage, an end, an
error) takes half of what the relay itself costs. Engines write each chunk
alike, and where the text has no quotation mark and no line break, it cannot be
anything but text.
"""

TEXTS = (b'"content":"', b'"text":"')
"""What stands before the text, in a chunk of a chat and in one of a completion."""
SIZE_LINE_MAX = 10
"""Longest line with the size of a chunk, its line break included."""


class ChunkForm:
    """What stands around the text of an HTTP chunk that was looked through: one event, with nothing but text in it."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before = before
        self._after = after

    @classmethod
    def of(cls, chunk: bytes) -> "ChunkForm | None":
        """Return the form of ``chunk``, None when it has no text that is known by its name."""
        begin = chunk.find(b"\r\n", 0, SIZE_LINE_MAX) + 2
        for name in TEXTS:
            at = chunk.find(name)
            if at > 0:
                at += len(name)
                return cls(chunk[begin:at], chunk[chunk.index(b'"', at) :])
        return None

    def fits(self, data: bytes) -> bool:
        """Say whether ``data`` is one whole chunk of this form, with some text in it."""
        if not data.endswith(self._after):
            return False
        begin = data.find(b"\r\n", 0, SIZE_LINE_MAX) + 2
        text_at = begin + len(self._before)
        text_end = len(data) - len(self._after)
        if text_at >= text_end or not data.startswith(self._before, begin):
            return False
        text = data[text_at:text_end]
        if b'"' in text or b"\n" in text:
            return False
        # Compared as text: a number would have to be parsed, and would also be one with a sign or a blank.
        return data[: begin - 2].lower() == b"%x" % (len(data) - begin - 2)
