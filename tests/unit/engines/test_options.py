"""Options that an engine does not take are told in words, with what it takes."""

from typing import Annotated, Literal

import msgspec
import pytest

from modelyard.engines import OptionsError
from modelyard.engines.options import read_options


class Taken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: Literal["generate", "embed"] = "generate"
    block: Literal[0, 8, 16] = 0
    pooling: Literal["", "mean"] = ""
    ways: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    share: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    eager: bool = False
    file: Annotated[str, msgspec.Meta(max_length=4)] = ""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("task", "embeding", "'embeding' is no value of it (did you mean 'embed'?); it takes embed or generate"),
        ("block", 7, "7 is no value of it; it takes 0, 8 or 16"),
        ("pooling", "max", "'max' is no value of it; it takes '' or mean"),
        ("ways", 65, "65 is no whole number from 0 to 64"),
        ("ways", 1.5, "1.5 is no whole number from 0 to 64"),
        ("ways", "x" * 99, f"'{'x' * 64}' is no whole number from 0 to 64"),
        ("share", 0, "0 is no number above 0"),
        ("eager", 1, "1 is neither true nor false"),
        ("file", "model", "'model' is no text of at most 4 characters"),
        ("file", True, "true is no text of at most 4 characters"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_right(name: str, value: str | float, told: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_options(Taken, {name: value}, engine="mine")
    assert caught.value.faults == {name: told}
    assert str(caught.value) == f"Option '{name}' of engine 'mine': {told}."
