"""The small real model, for tests that need one that loads."""

from pathlib import Path

import pytest
from tools.smollm import ModelMissing, model_file


def real_model() -> Path:
    """Return the file of SmolLM2; the test is skipped where it or its engine cannot be had."""
    pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")
    try:
        return model_file()
    except ModelMissing as error:
        pytest.skip(str(error))
