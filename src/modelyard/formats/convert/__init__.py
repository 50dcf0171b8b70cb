"""From one form of a model to another, without its maker's framework: ``modelyard models convert``.

Each form is one module here with a function ``convert(source, folder, progress)`` that fills an empty folder; the
command line finds it by the name after ``--to``. What they need (numpy, gguf, tokenizers) is the extra ``convert``,
imported when it is asked for.
"""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told how many bytes are done, of how many."""


class ConvertError(ValueError):
    """Why a model cannot be converted: one line for whoever asked for it."""
