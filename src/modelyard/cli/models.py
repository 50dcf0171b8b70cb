"""``modelyard models``: the models that this key may call."""

import click

from modelyard.cli.http import Platform, connected
from modelyard.cli.output import age, listing, show_list


@click.command(
    "models",
    epilog="\b\nExample:\n  modelyard models\n  modelyard models --json",
    short_help="List the models that this key may call.",
)
@connected
@listing
def command(*, platform: Platform, is_json: bool, is_quiet: bool) -> None:
    """List the models that this key may call, as OpenAI's SDKs see them."""
    columns = {
        "MODEL": lambda model: model["id"],
        "OWNER": lambda model: model.get("owned_by"),
        "AGE": lambda model: age(model.get("created")),
    }
    models = platform.get("/v1/models")["data"]
    empty = "No models. Deploy one: modelyard deploy ./model.gguf --name demo --wait"
    show_list(models, columns, is_json=is_json, is_quiet=is_quiet, empty=empty)
