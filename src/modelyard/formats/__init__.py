"""What is in a model file: bounded readers of our own for GGUF, safetensors and ONNX headers.

They read what a file says of itself (``domain/facts.py``) before any engine
sees it, and refuse what could hurt one (``reference/security.md`` S6 to S9):
every count, length and offset is checked against the file and against a limit,
tensors are never loaded, and work and memory are bounded whatever the bytes
(``cursor.py``). What a file is shows in its content, never in its name.

``folder.facts_of`` is the way in.
"""

_REASON_MAX = 500


class ArtifactInvalidError(ValueError):
    """Why a file is no model, or one that cannot be trusted: one line for whoever deploys it.

    It may quote the file, so what is quoted can neither end the line nor do anything to a terminal.
    """

    code = "artifact_invalid"

    def __init__(self, reason: str) -> None:
        line = "".join(character if character.isprintable() else "?" for character in reason[:_REASON_MAX])
        super().__init__(line)
