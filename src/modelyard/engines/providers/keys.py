"""Where a provider's key comes from: a variable or a file of the operator's; never an option, a record or a log.

Options name it. So that a deploy cannot send any secret of this machine to any
URL, variables begin with ``MODELYARD_PROVIDER_`` and files lie in one folder.
"""

import re
from collections.abc import Mapping
from pathlib import Path

KEY_VARIABLES = "MODELYARD_PROVIDER_"
"""What the name of a variable with a key begins with."""
KEY_LENGTH_MAX = 4096

_VARIABLE = re.compile(rf"{KEY_VARIABLES}[A-Z0-9_]{{1,64}}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyFault(ValueError):
    """Why there is no key, with the fix; never the key."""


class ProviderKeys:
    """The keys that this operator gives: ``environment`` of the controller, and files in ``folder`` (None: none)."""

    def __init__(self, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
        found = (environment or {}).items()
        self._variables = {name: value.strip() for name, value in found if name.startswith(KEY_VARIABLES)}
        self._folder = folder

    def __repr__(self) -> str:
        """Return it without the keys."""
        return f"<ProviderKeys: {', '.join(sorted(self._variables)) or 'no variables'}; files in {self._folder}>"

    def from_variable(self, name: str) -> str:
        """Return the key in a variable.

        Raises:
            KeyFault: the name is none of a key's, or nothing is there.
        """
        if not _VARIABLE.fullmatch(name):
            raise KeyFault(f"name a variable that begins with {KEY_VARIABLES}, like {KEY_VARIABLES}OPENAI")
        if not (key := self._variables.get(name)):
            raise KeyFault(f"{name} is not set where 'modelyard up' was started; set it and start it again")
        return checked(key, name)

    def file(self, name: str) -> Path:
        """Return the path of a file with a key, after a look at it.

        Raises:
            KeyFault: the name is no plain one, or nothing good is there.
        """
        if not _FILE.fullmatch(name):
            raise KeyFault("give the name of a file in the folder of provider keys, without a path")
        if self._folder is None:
            raise KeyFault("this platform has no folder of provider keys; use key_env")
        file = self._folder / name
        read_key(file)
        return file


def read_key(file: Path) -> str:
    """Return the key in ``file``.

    Raises:
        KeyFault: it cannot be read, is empty, or is no key.
    """
    try:
        with file.open("rb") as reader:
            raw = reader.read(KEY_LENGTH_MAX + 2)
    except OSError as error:
        raise KeyFault(f"{file} cannot be read ({error.strerror}); write the key there, mode 0600") from None
    return checked(raw.decode("utf-8", "replace").strip(), str(file))


def checked(key: str, where: str) -> str:
    """Return ``key`` if it can be sent in a header.

    Raises:
        KeyFault: it cannot.
    """
    if not key or len(key) > KEY_LENGTH_MAX or not key.isascii() or not key.isprintable() or " " in key:
        raise KeyFault(f"{where} holds no key: one line of at most {KEY_LENGTH_MAX} visible ASCII characters")
    return key
