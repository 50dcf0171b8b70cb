"""``modelyard run``: chat with a model from the terminal.

stdout carries the answer and nothing else, so that it can be piped. Ctrl-C
stops an answer; at the prompt it asks, and the second one leaves.
"""

import contextlib
import os
import stat
import sys
from dataclasses import dataclass, field

import click
import msgspec

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import Platform, close_names, connected
from modelyard.cli.output import Item, ProgressLine, clean, remark

_HELP = """\
/set system TEXT       what the model should be
/set temperature 0.7   and max_tokens, top_p, seed
/clear                 forget the conversation
/bye                   leave (or Ctrl-D)"""

_SETTINGS: dict[str, type[float] | type[int]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
}


@dataclass(slots=True)
class Chat:
    """A conversation with one model."""

    platform: Platform
    model: str
    system: str | None = None
    settings: dict[str, float | int] = field(default_factory=dict)
    turns: list[Item] = field(default_factory=list)

    def ask(self, prompt: str) -> None:
        """Print the answer to ``prompt`` as it comes; it joins the conversation when it is whole.

        Raises:
            Failure: the platform refused, or the answer was cut off.
        """
        question = {"role": "user", "content": prompt}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.turns, question],
            "stream": True,
            **self.settings,
        }
        try:
            answer = self._stream(body)
        except Refused as error:
            if error.code == "model_not_found":
                names = [model["id"] for model in self.platform.get("/v1/models")["data"]]
                raise error.with_hint(close_names(self.model, names)) from error
            raise
        self.turns += [question, {"role": "assistant", "content": answer}]

    def _stream(self, body: Item) -> str:
        is_terminal = sys.stdout.isatty()
        progress = ProgressLine()
        pieces: list[str] = []
        try:
            with self.platform.lines("POST", "/v1/chat/completions", body) as lines:
                for line in lines:
                    if line.startswith(":"):
                        progress.show(f"{self.model}: {_waiting(line)}")
                        continue
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return "".join(pieces)
                    if piece := _content(data):
                        progress.clear()
                        pieces.append(piece)
                        sys.stdout.write(clean(piece) if is_terminal else piece)
                        sys.stdout.flush()
        finally:
            progress.clear()
            if pieces and not pieces[-1].endswith("\n"):
                print(flush=True)
        raise Failure("The answer was cut off before its end. Please ask again.", Exit.UNAVAILABLE)


def _waiting(comment: str) -> str:
    """Return ``loading 42 %, ~8 s`` for the comment ``: loading 42 %, ~8 s, loading``: the stage first, once."""
    *numbers, stage = comment[1:].strip().removeprefix("loading").strip(" ,").split(", ")
    return " ".join([stage, ", ".join(numbers)]).strip()


def _content(data: str) -> str:
    """Return the text of one event; raises the error that it may carry instead."""
    if not data:
        return ""
    try:
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            raise Refused(clean(str(error.get("message", error))), status=502, code=error.get("code"))
        return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", []))
    except (msgspec.DecodeError, AttributeError, TypeError) as error:
        raise Failure("The model sent something that is no chat answer. See 'modelyard logs'.") from error


@click.command(
    "run",
    epilog="\b\nExample:\n  modelyard run demo 'Why is the sky blue?'\n  echo hi | modelyard run demo\n"
    "  modelyard run demo 'Summarise this:' < notes.txt",
    short_help="Chat with a model.",
)
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option("--system", metavar="TEXT", help="What the model should be.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is the same answer every time.")
@connected
def command(
    model: str,
    prompt: tuple[str, ...],
    *,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    platform: Platform,
) -> None:
    """Ask MODEL and print its answer as it comes.

    The question is PROMPT, with what is piped in below it. With neither, on a
    terminal, a conversation begins; Ctrl-C stops an answer, twice leaves.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature}
    settings = {name: value for name, value in given.items() if value is not None}
    chat = Chat(platform, model, system, settings)
    question = "\n\n".join(part for part in (" ".join(prompt), _piped()) if part)
    if question:
        chat.ask(question)
    elif sys.stdin.isatty():
        _converse(chat)
    else:
        raise click.UsageError("There is no question: give PROMPT, or pipe one in.")


def _piped() -> str:
    """Return what a pipe or a file on stdin holds; a terminal or /dev/null holds nothing."""
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode):
            return sys.stdin.read().strip()
    return ""


def _converse(chat: Chat) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing

    remark(f"Chat with {chat.model}. /help lists the commands.")
    is_leaving = False
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if is_leaving:
                raise
            remark("\nCtrl-C again, or /bye, leaves.")
            is_leaving = True
            continue
        if line in {"/bye", "/exit", "/quit"}:
            return
        is_leaving = not _answer(chat, line)


def _answer(chat: Chat, line: str) -> bool:
    """Do what one line of a conversation says; False when Ctrl-C stopped the answer."""
    if line.startswith("/"):
        _obey(chat, line)
    elif line:
        try:
            chat.ask(line)
        except KeyboardInterrupt:
            remark("(stopped)")
            return False
        except Failure as error:
            if error.exit_code in {Exit.AUTH, Exit.NOT_FOUND}:
                raise
            remark(f"Error: {error}")
    return True


def _obey(chat: Chat, line: str) -> None:
    verb, _, rest = line.partition(" ")
    name, _, value = rest.strip().partition(" ")
    if verb == "/clear":
        chat.turns.clear()
        remark("Forgotten.")
    elif verb == "/set" and name == "system":
        chat.system = value or None
    elif verb == "/set" and name in _SETTINGS:
        try:
            chat.settings[name] = _SETTINGS[name](value)
        except ValueError:
            remark(f"'{value}' is no number for {name}.")
    else:
        if verb != "/help":
            remark(f"Unknown command: {line}")
        remark(_HELP)
