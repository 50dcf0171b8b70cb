"""``modelyard completion``: the script that lets a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

_EXAMPLE = """\b
Example:
  modelyard completion bash > ~/.local/share/bash-completion/completions/modelyard
  modelyard completion zsh > "${fpath[1]}/_modelyard"
  modelyard completion fish > ~/.config/fish/completions/modelyard.fish"""


@click.command("completion", epilog=_EXAMPLE, short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print a script that makes Tab complete commands and options in SHELL.

    Keep it where the shell looks for such scripts, or source it in the shell's startup file.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that may be chosen"
    print(kind(context.find_root().command, {}, "modelyard", "_MODELYARD_COMPLETE").source())
