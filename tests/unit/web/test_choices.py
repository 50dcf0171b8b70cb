"""Where a word is none of the few that may stand somewhere, the refusal says which may."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest

from modelyard.errors import ApiError
from modelyard.web.choices import choices
from modelyard.web.decoding import decode, decode_query
from modelyard.web.gathering import gathered


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    colour: Colour = Colour.RED


class Asked(msgspec.Struct):
    width: Annotated[Literal["1m", "1h"], msgspec.Meta(description="How wide.")] = "1m"
    inner: Inner | None = None
    many: list[Inner] = []
    number: int = 0


def test_a_query_and_a_body_say_which_words_are_known() -> None:
    with pytest.raises(ApiError) as refused:
        decode_query(Asked, b"width=1w")
    assert refused.value.param == "width"
    assert "'1w'; use one of 1m, 1h" in refused.value.message
    with pytest.raises(ApiError) as refused:
        decode(msgspec.json.Decoder(Asked), b'{"inner": {"colour": "green"}}')
    assert refused.value.param == "inner.colour"
    assert "use one of red, blue" in refused.value.message
    with pytest.raises(ApiError) as refused:
        decode_query(Asked, b"width=" + b"w" * 5000)
    assert "use one of 1m, 1h" in refused.value.message
    assert len(refused.value.message) < 400


def test_all_that_is_wrong_says_which_words_are_known() -> None:
    _, flaws = gathered(Asked, {"width": "1w", "many": [{"colour": "green"}]})
    assert [(flaw.param, flaw.reason) for flaw in flaws] == [
        ("many[0].colour", "invalid enum value 'green'; use one of red, blue"),
        ("width", "invalid enum value '1w'; use one of 1m, 1h"),
    ]


@pytest.mark.parametrize("path", ["", "nosuch", "number", "many[0].colour", "width.more", "inner.colour.x"])
def test_no_words_are_said_where_it_is_not_plain_which(path: str) -> None:
    assert choices(Asked, path) == ()
    assert choices(None, path) == ()
    assert choices(list[Asked], path) == ()
