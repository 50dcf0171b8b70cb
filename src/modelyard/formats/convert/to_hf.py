"""A GGUF file as a Hugging Face folder, which vLLM, SGLang and PEFT load: ``--to hf``.

The weights become bfloat16, whatever they were packed in: what a quantisation
took is gone, and the folder is as large as the model was before it.
"""

from functools import partial
from pathlib import Path

import msgspec

from modelyard.formats.convert import ConvertError, Progress, vocabulary
from modelyard.formats.convert.architectures import architecture_of, config_of, name_of, order_of
from modelyard.formats.convert.gguf_source import GgufSource
from modelyard.formats.convert.safetensors_writer import Tensor, write
from modelyard.formats.folder import kind_of_file
from modelyard.formats.sniff import Kind

PACKAGES = ("gguf", "numpy", "tokenizers")
"""What it imports beside the platform's own."""


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Fill the empty ``folder`` from the GGUF file ``source``.

    Raises:
        ConvertError: it is of an architecture, or has a tokenizer, that is not converted.
        ArtifactInvalidError: it is no sound model.
    """
    if not source.is_file():
        raise ConvertError(f"'{source}' is no file; '--to hf' converts a GGUF file, '--to onnx' the folder of a BERT.")
    if (kind := kind_of_file(source)) is not Kind.GGUF:
        raise ConvertError(f"'{source}' is {kind}; '--to hf' converts a GGUF file.")
    model = GgufSource(source)
    architecture = architecture_of(model)
    config = config_of(model, architecture)
    tensors = []
    for name in model.names:
        if own := name_of(name, config["num_hidden_layers"]):
            order = order_of(name, architecture, config)
            tensors.append(Tensor(own, model.shape(name), partial(model.rows, name, order)))
    vocabulary.write(model, folder)
    content = config | vocabulary.ids_of(model)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    whole = sum(tensor.size for tensor in tensors)
    done = 0

    def note(size: int) -> None:
        nonlocal done
        done += size
        progress(done, whole)

    write(tensors, folder, note)
