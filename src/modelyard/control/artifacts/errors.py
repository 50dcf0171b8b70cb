"""Why an artifact cannot be had, in words for whoever deploys it."""


class ArtifactError(Exception):
    """Why an artifact cannot be used. ``is_transient``: the same fetch may go better soon."""

    def __init__(self, text: str, *, is_transient: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient


class CorruptError(ArtifactError):
    """The bytes are not those that were promised; the text begins with ``artifact_corrupt``."""

    def __init__(self, text: str) -> None:
        super().__init__(f"artifact_corrupt: {text}")


class RefusedError(ArtifactError):
    """It is no kind of file that a model may be, or that its engine loads."""


class ChangedError(ArtifactError):
    """The source holds other content than when its fetch began."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} changed while it was fetched")
