"""The gallery has every example, and the how-to every key that a scenario may have."""

from pathlib import Path

import msgspec
import pytest

from modelyard.sim import examples
from modelyard.sim import scenario_body as bodies

DOCS = Path(__file__).resolve().parents[3] / "docs"
GALLERY = DOCS / "explanation" / "simulator-gallery.md"


@pytest.mark.parametrize("name", examples.names())
def test_the_gallery_shows_every_example_with_its_table_and_a_picture(name: str) -> None:
    text = GALLERY.read_text("utf-8")
    title = examples.title(name)
    assert f"## {title}\n" in text
    assert f"$ modelyard sim {name}\nScenario  {title}\n" in text
    assert f"](simulator-gallery/{name}.svg)" in text
    assert 0 < (GALLERY.with_suffix("") / f"{name}.svg").stat().st_size <= 60_000


def test_the_gallery_shows_nothing_that_is_gone() -> None:
    pictures = {file.stem for file in GALLERY.with_suffix("").iterdir()}
    assert pictures == set(examples.names())


@pytest.mark.parametrize(
    "body",
    [one for one in vars(bodies).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)
     and one.__module__ == bodies.__name__],
)  # fmt: skip
def test_every_key_of_a_scenario_is_in_the_how_to(body: type[msgspec.Struct]) -> None:
    text = (DOCS / "how-to" / "simulate.md").read_text("utf-8")
    missing = [
        name for name in body.__struct_fields__
        if f"`{name}" not in text and f".{name}`" not in text and f"[{name}]" not in text
    ]  # fmt: skip
    assert not missing
