"""Engines whose program is installed beside the platform."""

import shutil

from modelyard.engines.defaults import EngineDefaults


class ProgramEngine(EngineDefaults):
    """An engine that is started as ``command``, the words that its command begins with."""

    name = ""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command

    def missing(self) -> str:
        """Return the fix when its program is not here, else ""."""
        if self._command and shutil.which(self._command[0]):
            return ""
        named = self._command[0] if self._command else ""
        return (
            f"The engine '{self.name}' needs the program '{named}', which is not on this machine. Install it beside "
            f"the platform, and name it in the configuration when it is not on the PATH: engines.{self.name}"
        )
