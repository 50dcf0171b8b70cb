"""``modelyard models upload``: a file or folder of this machine to the platform, wherever it is."""

import re
from pathlib import Path

import click

from modelyard.cli.engine_choice import engine_of_content
from modelyard.cli.http import Platform, connected
from modelyard.cli.output import formats, show_json
from modelyard.cli.uploading import upload, upload_folder

PARALLEL = 2
"""Parts at once: one is on its way while the platform syncs the other."""


def name_of(file: Path) -> str:
    """Return a model's name from that of its file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._") or "model"


def is_adapter(file: Path) -> bool:
    """Say whether ``file`` is the folder of an adapter as PEFT writes it."""
    return (file / "adapter_config.json").is_file()


@click.command(
    "upload",
    epilog="\b\nExample:\n  modelyard models upload ./model.gguf\n  modelyard models upload ./model.gguf -q",
    short_help="Send a model's file or folder to the platform.",
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="What it is, in listings. [default: the file's name]")
@click.option("--parallel", type=click.IntRange(1, 16), default=PARALLEL, show_default=True, help="Parts at once.")
@connected
@formats("Print only what 'modelyard deploy' takes: upload:sha256:….")
def command(path: Path, *, name: str | None, parallel: int, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """Send the file, or the files of the folder, at PATH by parts.

    After Ctrl-C or a lost line the same command goes on where it was.
    """
    file = path.expanduser().absolute()
    send = upload_folder if file.is_dir() else upload
    done = send(platform, file, name=name or name_of(file), parallel=parallel)
    if is_json:
        show_json(done)
    elif is_quiet:
        print(done["uri"])
    else:
        # Whoever deploys it has only the digest: what the content says of the engine must go along.
        kind = "--base NAME@VERSION" if is_adapter(file) else f"--engine {engine_of_content(file) or 'ENGINE'}"
        order = f"{done['uri']} --name {done['name']} {kind}"
        print(f"Uploaded {file.name} as {done['uri']}. Deploy it: modelyard deploy {order}")
