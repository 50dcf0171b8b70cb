"""``modelyard models``: the models that this key may call, and what the registry has of them."""

import click

from modelyard.cli import convert, model_inspect, model_upload, model_versions
from modelyard.cli.http import Platform, connected
from modelyard.cli.nouns import NounGroup
from modelyard.cli.output import age, listing, show_list


@click.group(
    "models",
    cls=NounGroup,
    epilog="\b\nExample:\n  modelyard models\n  modelyard models inspect ./model.gguf\n"
    "  modelyard models upload ./model.gguf\n  modelyard models versions smol",
    short_help="List, inspect, convert, upload and remove models.",
)
def command() -> None:
    """List the models that this key may call, look into one, send one to the platform, list or remove its versions."""


@command.command("list", epilog="\b\nExample:\n  modelyard models list --json")
@connected
@listing
def list_models(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List the models that this key may call, as OpenAI's SDKs see them."""
    columns = {
        "MODEL": lambda model: model["id"],
        "OWNER": lambda model: model.get("owned_by"),
        "AGE": lambda model: age(model.get("created")),
    }
    models = platform.get("/v1/models")["data"]
    empty = "No models. Deploy one: modelyard deploy ./model.gguf --name demo --wait"
    show_list(models, columns, is_json=is_json, is_quiet=is_quiet, empty=empty)


for _verb in (
    model_inspect.command,
    convert.command,
    model_upload.command,
    model_versions.versions,
    model_versions.remove,
):
    command.add_command(_verb)
