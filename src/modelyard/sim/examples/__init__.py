"""Scenarios that come with the package: files beside this one, and the rates that those of fleets are driven by."""

from pathlib import Path

FOLDER = Path(__file__).parent
RATES = FOLDER / "rates"
"""A part of ServeGen's rates; its README says which."""


def names() -> list[str]:
    """Return the names of all, as ``modelyard sim NAME`` takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def text(name: str) -> str:
    """Return the file of one of ``names``."""
    return (FOLDER / f"{name}.toml").read_text("utf-8")


def title(name: str) -> str:
    """Return its title."""
    line = next((line for line in text(name).splitlines() if line.startswith("title = ")), "")
    return line.partition('"')[2].rpartition('"')[0]
