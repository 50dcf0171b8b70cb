"""The command line of a simulated engine, as ``SimulatedEngine.command`` renders it."""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from modelyard.engines.simulated.options import SimulatedOptions


class Arguments(NamedTuple):
    """What a command line says; ``given`` are the options in it, as text."""

    host: str
    port: int
    model_name: str
    work_dir: Path
    given: dict[str, str]

    def options(self) -> SimulatedOptions:
        """Return the options.

        Raises:
            ValueError: a bad value.
        """
        return msgspec.convert(self.given, SimulatedOptions, strict=False)

    def journal(self, options: SimulatedOptions) -> Path:
        """Return the file of the token journal."""
        return Path(options.journal) if options.journal else self.work_dir / "tokens.jsonl"


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Return what ``argv`` says; one that says nothing ends the process with code 2."""
    read = vars(_parser().parse_args(argv))
    given = {name: read[name] for name in SimulatedOptions.__struct_fields__ if read[name] is not None}
    return Arguments(read["host"], read["port"], read["model_name"], read["work_dir"], given)


@cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m modelyard.engines.simulated", description="Run one simulated engine."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--work-dir", type=Path, default=Path())
    for name in SimulatedOptions.__struct_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", default=None)
    return parser
