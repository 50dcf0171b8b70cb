"""Pictures: judged by their header before a pixel is decoded, then made what the model was trained on.

A file of some hundred bytes can say that it is 40,000 by 40,000 (``reference/security.md`` S29), so its size is
read first; only formats with well-kept decoders are taken.
"""

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

import msgspec

from modelyard.engines.onnx.refusals import Refused, wrong_request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES_MAX = 20 * 1024 * 1024
FORMATS = ("PNG", "JPEG", "WEBP")
_SIDE_MAX = 8192
_NEAREST, _BILINEAR, _BICUBIC = 0, 2, 3


class Preparation(msgspec.Struct, frozen=True):
    """How pixels become numbers, as ``preprocessor_config.json`` says it."""

    width: int
    height: int
    shortest_edge: int = 0
    """Resize so that the shorter side has so many pixels, then cut ``width`` by ``height`` out of the middle."""
    resample: int = _BILINEAR
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    is_channels_last: bool = False
    is_bgr: bool = False


def preparation_of(config: dict[str, Any], shape: list[Any]) -> Preparation:
    """Return how to prepare pictures for an input of ``shape``, from a preprocessor's configuration.

    Raises:
        ValueError: it does not say how large pictures are, or says nonsense.
    """
    is_last = len(shape) == 4 and shape[3] == 3
    tall, wide = (shape[1:3] if is_last else shape[2:4]) if len(shape) == 4 else (None, None)
    edge, height, width = 0, _side(tall), _side(wide)
    size, crop = config.get("size"), config.get("crop_size")
    if config.get("do_resize", True):
        edge, height, width = _sizes(size, height, width)
    if config.get("do_center_crop", False) and crop is not None:
        _, height, width = _sizes(crop, height, width)
    if edge and not (height and width):
        height = width = edge
    if not (0 < height <= _SIDE_MAX and 0 < width <= _SIDE_MAX):
        raise ValueError("neither preprocessor_config.json nor the graph says how large pictures are")
    does_normalise = config.get("do_normalize", "image_mean" in config)
    return Preparation(
        width=width,
        height=height,
        shortest_edge=edge,
        resample=int(config.get("resample", _BILINEAR)),
        scale=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        mean=_three(config.get("image_mean", 0.5)) if does_normalise else (0.0, 0.0, 0.0),
        deviation=_three(config.get("image_std", 0.5)) if does_normalise else (1.0, 1.0, 1.0),
        is_channels_last=is_last,
        is_bgr=bool(config.get("do_flip_channel_order", False)),
    )


def content_of(url: str) -> bytes:
    """Return the bytes in a ``data:`` URL, or of bare base64.

    Raises:
        Refused: it is a link, which this process never follows, or no base64.
    """
    if url.startswith(("http:", "https:")):
        raise wrong_request("Links are not fetched here; send the picture as a data: URL.", "input")
    head, comma, data = url.partition(",")
    if url.startswith("data:") and (not comma or not head.endswith(";base64")):
        raise wrong_request("A data: URL must hold base64.", "input")
    text = data if url.startswith("data:") else url
    if len(text) > BYTES_MAX * 4 // 3 + 4:
        raise Refused(413, "image_too_large", f"A picture may have at most {BYTES_MAX:,} bytes.", "input")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong_request("The picture is no base64.", "input") from None


def prepared(content: bytes, how: Preparation, pixels_max: int) -> "NDArray[np.float32]":
    """Return a picture as the model's input without its first axis. Blocks.

    Raises:
        Refused: it is no picture that is taken, is too large, or is broken.
    """
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # judged here, by the option
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > pixels_max or not width or not height:
                raise Refused(
                    400, "image_too_large", f"The picture has {width} by {height} pixels; the most is {pixels_max:,}.",
                    "input",
                )  # fmt: skip
            # A JPEG is decoded at a fraction of its size where that is still larger than what is needed.
            picture.draft("RGB", (max(how.width, how.shortest_edge), max(how.height, how.shortest_edge)))
            return _numbers(_fitted(picture.convert("RGB"), how), how)
    except UnidentifiedImageError:
        raise wrong_request(f"The picture is none of {', '.join(FORMATS)}.", "input") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise wrong_request(f"The picture is broken: {error}.", "input") from None


def _fitted(picture: Any, how: Preparation) -> Any:
    if not how.shortest_edge:
        return picture.resize((how.width, how.height), how.resample)
    width, height = picture.size
    factor = how.shortest_edge / min(width, height)
    # A strip of a picture must not become larger than memory.
    wide, tall = min(round(width * factor), _SIDE_MAX), min(round(height * factor), _SIDE_MAX)
    picture = picture.resize((max(wide, 1), max(tall, 1)), how.resample)
    left, top = (picture.size[0] - how.width) // 2, (picture.size[1] - how.height) // 2
    return picture.crop((left, top, left + how.width, top + how.height))


def _numbers(picture: Any, how: Preparation) -> "NDArray[np.float32]":
    import numpy as np

    pixels: NDArray[Any] = np.asarray(picture, dtype=np.float32) * np.float32(how.scale)
    if how.is_bgr:
        pixels = pixels[:, :, ::-1]
    pixels = (pixels - np.array(how.mean, np.float32)) / np.array(how.deviation, np.float32)
    return np.ascontiguousarray(pixels if how.is_channels_last else pixels.transpose(2, 0, 1))


def _sizes(said: object, height: int, width: int) -> tuple[int, int, int]:
    """Return shortest edge, height and width of what ``size`` says in any of its forms."""
    if isinstance(said, int) and not isinstance(said, bool):
        return said, height, width
    if isinstance(said, dict):
        if "shortest_edge" in said:
            return _side(said["shortest_edge"]), height, width
        return 0, _side(said.get("height")) or height, _side(said.get("width")) or width
    return 0, height, width


def _side(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _SIDE_MAX else 0


def _three(value: Any) -> tuple[float, ...]:
    listed = [float(one) for one in value] if isinstance(value, list) else [float(value)] * 3
    if len(listed) != 3:
        raise ValueError("the preprocessor's mean and deviation must have three numbers")
    return tuple(listed)
