"""Pictures are judged by their header, and become what a preprocessor's configuration says."""

import base64
import io
import struct
import zlib

import pytest

np = pytest.importorskip("numpy", reason="needs the extra 'onnx'")
Image = pytest.importorskip("PIL.Image", reason="needs the extra 'onnx'")

from modelyard.engines.onnx.pictures import content_of, preparation_of, prepared  # noqa: E402
from modelyard.engines.onnx.refusals import Refused  # noqa: E402

VIT = {
    "size": {"height": 4, "width": 4}, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
CLIP = {"size": {"shortest_edge": 8}, "crop_size": {"height": 4, "width": 4}, "do_center_crop": True}
SHAPE = ["batch", 3, "height", "width"]


def png(width: int, height: int, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def noise() -> bytes:
    """Return a picture that cannot be packed well."""
    pixels = np.random.default_rng(1).integers(0, 255, (31, 31, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of some hundred bytes that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_pixels_are_scaled_and_normalised_channels_first() -> None:
    array = prepared(png(10, 6), preparation_of(VIT, SHAPE), 1000)
    assert array.shape == (3, 4, 4)
    assert array[0] == pytest.approx(1.0)
    assert array[1:] == pytest.approx(-1.0)


def test_the_middle_is_cut_out_of_the_shortest_edge() -> None:
    picture = Image.new("RGB", (16, 8), (0, 0, 0))
    picture.paste((255, 255, 255), (6, 2, 10, 6))
    out = io.BytesIO()
    picture.save(out, "PNG")
    how = preparation_of(CLIP | {"resample": 0, "do_normalize": False}, SHAPE)
    assert prepared(out.getvalue(), how, 1000) == pytest.approx(1.0), "exactly the white middle"


def test_channels_last_is_seen_from_the_graph() -> None:
    how = preparation_of({}, ["batch", 5, 7, 3])
    assert prepared(png(3, 3), how, 1000).shape == (5, 7, 3)


def test_a_size_that_nobody_says_is_an_error() -> None:
    with pytest.raises(ValueError, match="how large"):
        preparation_of({}, SHAPE)


def test_a_bomb_is_refused_by_its_header() -> None:
    with pytest.raises(Refused, match="40000 by 40000"):
        prepared(bomb(40_000, 40_000), preparation_of(VIT, SHAPE), 40_000_000)


@pytest.mark.parametrize("content", [b"", b"GIF89a" + bytes(20), b"<svg/>", noise()[:2000], bomb(31, 31)])
def test_what_is_no_whole_picture_is_refused(content: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        prepared(content, preparation_of(VIT, SHAPE), 1000)
    assert refusal.value.status == 400


def test_links_are_never_followed() -> None:
    with pytest.raises(Refused, match="not fetched"):
        content_of("http://169.254.169.254/latest/meta-data")
    with pytest.raises(Refused, match="base64"):
        content_of("data:image/png,raw")
    with pytest.raises(Refused, match="base64"):
        content_of("data:image/png;base64,%%%")
    assert content_of("data:image/png;base64," + base64.b64encode(b"x").decode()) == b"x"
