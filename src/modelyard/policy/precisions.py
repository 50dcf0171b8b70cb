"""In how many bits weights can be kept, what that costs in quality, and when it must not be done.

Sizes: GGUF mixtures have the bits a weight of llama.cpp's ``tools/quantize`` page (Llama-3.1-8B, embeddings
included); others keep embeddings and the output layer in 16 bits, as the published models do. Quality: the source's
figures (section 8, "Quantization"), and that page's perplexities for GGUF.
"""

from enum import StrEnum

import msgspec


class Purpose(StrEnum):
    """What a model is for, as far as that forbids fewer bits."""

    GENERAL = "general"
    MATH = "math"
    CODE_EXACT = "code-exact"
    EMBEDDINGS = "embeddings"
    REPRODUCIBLE = "reproducible"


class Arithmetic(StrEnum):
    """The numbers that products are made with: which of an accelerator's speeds counts."""

    SIXTEEN = "16"
    FP8 = "fp8"
    INT8 = "int8"


class Precision(msgspec.Struct, frozen=True):
    """A way to keep weights."""

    name: str
    bits: float
    """Of a weight, with its share of scales."""
    arithmetic: Arithmetic = Arithmetic.SIXTEEN
    is_gguf: bool = False
    """All weights have ``bits``, and llama.cpp runs it: layers are divided over accelerators, which take turns."""
    is_lossless: bool = False
    quality: str = ""


BF16 = Precision("bf16", 16.0, is_lossless=True, quality="as trained")
FP16 = Precision("fp16", 16.0, is_lossless=True, quality="as trained")
"""Instead of BF16: what a model was trained in, or all that an accelerator has."""
PRECISIONS = (
    BF16,
    Precision("fp8", 8.0, Arithmetic.FP8, quality="about 99.8 % of 16 bits; weights and activations in 8 bits"),
    Precision("int8", 8.0, Arithmetic.INT8, quality="about 99.5 %; W8A8 needs a calibrated model"),
    Precision("int4", 4.16, quality="98 to 99 %; AWQ or GPTQ in groups of 128, computed in 16 bits"),
    Precision("q8_0", 8.5, is_gguf=True, quality="within noise of 16 bits"),
    Precision("q6_k", 6.56, is_gguf=True, quality="within noise of 16 bits on most tasks"),
    Precision("q5_k_m", 5.7, is_gguf=True, quality="about 99.5 %"),
    Precision("q4_k_m", 4.89, is_gguf=True, quality="98 to 99 %"),
)
"""Best first within those that one engine runs."""

OWN_BITS = {"fp8": 8.0, "awq": 4.16, "gptq": 4.16, "mxfp4": 4.25, "compressed-tensors": 8.0, "F32": 32.0}
"""Of weights that are not here to be counted, by what their configuration calls it; others have 16."""

_WHY_NOT = {
    Purpose.MATH: "math needs exact digits over many steps, where small errors of weights add up",
    Purpose.CODE_EXACT: "code that must be exact breaks by one wrong token",
    Purpose.EMBEDDINGS: "vectors lose quality, and no longer match those that were stored before",
    Purpose.REPRODUCIBLE: "answers must be the same as those of the weights as they were trained",
}


def why_not(purpose: Purpose) -> str:
    """Return why a model of ``purpose`` must not have fewer bits, "" where it may."""
    return _WHY_NOT.get(purpose, "")
