"""``modelyard models convert``: from one form of a model to another, on this machine and without a platform."""

import importlib
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click

from modelyard.cli.bars import ByteBar, size_text
from modelyard.cli.exits import Exit, Failure
from modelyard.cli.output import remark


class Form(NamedTuple):
    """A form that models are converted to: ``module`` has ``convert(source, folder, progress)``, ``PACKAGES``, and
    ``NOTE`` where who uses the result must know something."""

    module: str
    next_step: str
    """What is said when it is done; ``{folder}`` is where the model is."""


FORMS = {
    "hf": Form(
        "modelyard.formats.convert.to_hf",
        "Deploy it: modelyard deploy {folder} --engine vllm --name NAME",
    ),
    "onnx": Form(
        "modelyard.formats.convert.onnx_bert",
        "Deploy it: modelyard deploy {folder} --engine onnx --name NAME",
    ),
    "onnx-int8": Form(
        "modelyard.formats.convert.onnx_bert_int8",
        "Deploy it: modelyard deploy {folder} --engine onnx --name NAME",
    ),
}


@click.command(
    "convert",
    epilog="\b\nExample:\n  modelyard models convert ./model.gguf ./model-hf\n"
    "  modelyard models convert ./all-MiniLM-L6-v2 ./minilm --to onnx",
    short_help="Convert a model to another form.",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(list(FORMS)), default="hf", show_default=True, help="The new form.")
def command(source: Path, dest: Path, *, form: str) -> None:
    """Convert the model at SOURCE and put it into the new folder DEST.

    hf: a GGUF file becomes a Hugging Face folder (safetensors in bfloat16, configuration, tokenizer with its chat
    template), which vLLM and PEFT load. Llama and Qwen 2 and 3 are converted, others are refused.

    onnx: a folder of BERT, RoBERTa, XLM-RoBERTa, CamemBERT or DistilBERT in safetensors becomes a graph with its
    tokenizer and configuration, which the engine 'onnx' serves: vectors, ranks, classes or tags.

    onnx-int8: the same with weights of 8 bits, smaller and faster on CPUs, and with other answers.
    """
    chosen = FORMS[form]
    module = importlib.import_module(chosen.module)
    _check_packages(module.PACKAGES)
    source, dest = source.expanduser(), dest.expanduser()
    if not source.exists():
        raise Failure(f"There is no file '{source}'.", Exit.NOT_FOUND)
    if dest.exists():
        raise Failure(f"'{dest}' is there already. Name a folder that is not.", Exit.USAGE)
    _fill(module, source, dest)
    size = sum(file.stat().st_size for file in dest.rglob("*") if file.is_file())
    print(f"Converted {source.name} to {dest} ({size_text(size)}). {chosen.next_step.format(folder=dest)}")
    if note := getattr(module, "NOTE", ""):
        remark(f"Note: {note}")


def _check_packages(names: tuple[str, ...]) -> None:
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise Failure(
            f"Converting needs {', '.join(missing)}, which are not installed. Run: pip install 'modelyard[convert]'"
        )


def _fill(module: ModuleType, source: Path, dest: Path) -> None:
    """Make ``dest`` whole or not at all."""
    from modelyard.formats import ArtifactInvalidError
    from modelyard.formats.convert import ConvertError

    part = dest.with_name(f"{dest.name}.part")
    bar: ByteBar | None = None
    told = 0

    def show(done: int, whole: int) -> None:
        nonlocal bar, told
        if bar is None:
            bar = ByteBar(source.name, whole)
        bar.add(done - told)
        told = done

    try:
        # Half of one that was killed.
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        module.convert(source, part, show)
        part.rename(dest)
    except (ConvertError, ArtifactInvalidError) as error:
        raise Failure(f"{source}: {error}") from error
    except OSError as error:
        raise Failure(f"Cannot convert {source}: {error.filename or dest}: {error.strerror}.") from error
    finally:
        if bar is not None:
            bar.close()
        shutil.rmtree(part, ignore_errors=True)
