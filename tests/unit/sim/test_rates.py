"""Readers of public measurements: what the files say, and nothing that they do not."""

from pathlib import Path

import numpy as np
import pytest

from modelyard.sim.rates import LOADS_FILE, RATES_FILE, load_times, servegen


def written(folder: Path) -> Path:
    rates = np.zeros((2, 288), dtype=np.float32)
    rates[0, 3], rates[0, 150], rates[1, 0] = 1.5, 2.5, 0.25
    np.savez_compressed(
        folder / RATES_FILE,
        names=np.array(["language/a", "reason/b"]),
        rate=rates,
        cv=np.ones_like(rates),
        mean_tokens=np.array([[100.0, 20.0], [np.nan, np.nan]], dtype=np.float32),
    )
    return folder


def test_clients_have_their_rates_and_tokens(tmp_path: Path) -> None:
    first, second = servegen(written(tmp_path))
    assert (first.name, first.family, first.days) == ("language/a", "language", 2)
    assert (first.rates[3], first.rates[150], first.mean_rate) == (1.5, 2.5, 4 / 288)
    assert (first.prompt_tokens, first.completion_tokens) == (100.0, 20.0)
    assert (second.days, second.prompt_tokens) == (1, 0.0), "what is not a number is not known"


def test_load_times_are_means_by_model_and_where_weights_were(tmp_path: Path) -> None:
    lines = ["gpu_year,mode,file,model_replica,loading_s"]
    lines += [f"h100,{mode},x_{kind}_1.json,m/8B_{number},{seconds}" for mode, kind, number, seconds in (
        ("random", "sllm", 1, 1.0), ("random", "sllm", 2, 3.0), ("cached", "safetensors", 1, 9.0),
    )]  # fmt: skip
    (tmp_path / LOADS_FILE).write_text("\n".join(lines) + "\n")
    found = [(one.loader, one.cache, one.model, one.seconds, one.samples) for one in load_times(tmp_path)]
    assert found == [("safetensors", "cached", "m/8B", 9.0, 1), ("sllm", "random", "m/8B", 2.0, 2)]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / RATES_FILE, rate=np.zeros((1, 1)), cv=np.zeros((1, 1)), mean_tokens=np.zeros(2), names=["a"])
    with pytest.raises(ValueError, match="numbers of type"):
        servegen(tmp_path)
