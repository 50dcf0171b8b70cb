"""Whether an engine's program is on this machine, for engines that are installed beside the platform."""

import shutil


def missing_program(engine: str, command: tuple[str, ...]) -> str:
    """Return why ``command`` cannot run here and the fix, or "" when its program is found."""
    if command and shutil.which(command[0]):
        return ""
    named = command[0] if command else ""
    return (
        f"The engine '{engine}' needs the program '{named}', which is not on this machine. Install it beside the "
        f"platform, and name it in the configuration when it is not on the PATH: engines.{engine}"
    )
