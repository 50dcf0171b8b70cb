"""Configuration: three sources, later wins; every mistake is one line that names where and what."""

import stat
from pathlib import Path

import pytest

from modelyard.config import Config, DataDirectory, load
from modelyard.errors import StartupError


def _file(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "modelyard.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def _refusal(file: Path | None, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        load(file, environment or {}, {"gateway": {"host": "127.0.0.1"}})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_given_is_the_defaults() -> None:
    assert load(None, {"PATH": "/bin", "MODELYARD_DATA_DIR": "/x"}) == Config()


def test_the_file_beats_defaults_the_environment_beats_the_file_and_flags_beat_both(tmp_path: Path) -> None:
    file = _file(tmp_path, "[gateway]\nport = 1\nworkers = 2\nqueue_max = 3\n")
    environment = {"MODELYARD__GATEWAY__WORKERS": "4", "MODELYARD__GATEWAY__QUEUE_MAX": "5"}
    got = load(file, environment, {"gateway": {"queue_max": 6}}).gateway
    assert (got.port, got.workers, got.queue_max) == (1, 4, 6)


def test_environment_values_are_text_that_becomes_the_settings_type() -> None:
    environment = {
        "MODELYARD__GATEWAY__METRICS_PUBLIC": "true",
        "MODELYARD__CONTROL__PASS_INTERVAL_S": "0.5",
        "MODELYARD__PRICES__SMOL__OUTPUT": "0.6",
    }
    config = load(None, environment)
    assert config.gateway.metrics_public is True
    assert config.control.pass_interval_s == 0.5
    assert config.prices["smol"].output == 0.6


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = [", "not valid TOML"),
        (b"\xff", "not valid TOML"),
        ("x = " + "[" * 5000, "nested too deeply"),
        ("gateway = 3", "gateway: "),
        ("[gateway]\nport = true", "gateway.port: expected integer"),
        ("[gateway]\nport = 65536", "gateway.port: expected integer"),
        ("[gateway]\nqueue_wait_s = nan", "gateway.queue_wait_s: expected number"),
        ("[gateway]\nqueue_wait_s = inf", "gateway.queue_wait_s: expected number"),
        ("[gateway]\nqueue_wait_s = 0", "gateway.queue_wait_s: expected number"),
        ("[fleet]\nthreads = -1", "fleet.threads: expected integer"),
        ("[fleet]\nkind = 'moon'", "fleet.kind: "),
        ("[prices.smol]\ninput = inf", "input"),
        ("[prices.smol]\noutput = -1", "output"),
        (
            "[stripe.meters]\nspent = 'dollars'",
            "stripe.meters.spent: invalid enum value 'dollars' (one of cost_nanousd,",
        ),
        ("[billing.smtp]\nhost = 'mail.example'", "billing.smtp: with a 'host', 'sender' must be the address"),
    ],
)
def test_a_bad_file_is_one_line_naming_file_and_setting(tmp_path: Path, text: str | bytes, named: str) -> None:
    refusal = _refusal(_file(tmp_path, text))
    assert named in refusal
    assert "modelyard.toml" in refusal


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[gatway]\nport = 1", "gateway"),
        ("[gateway]\nprot = 1", "port"),
        ("[control]\npass_intervall_s = 1", "pass_interval_s"),
        ("[prices.smol]\noutptu = 1", "output"),
    ],
)
def test_a_misspelt_setting_is_guessed(tmp_path: Path, text: str, meant: str) -> None:
    assert f"Did you mean '{meant}'?" in _refusal(_file(tmp_path, text))


def test_a_bad_variable_is_named_even_beside_a_good_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "[gateway]\nport = 1\n")
    assert "MODELYARD__GATEWAY__WORKERS" in _refusal(file, {"MODELYARD__GATEWAY__WORKERS": "many"})
    assert "MODELYARD__GATEWAY__PROT" in _refusal(file, {"MODELYARD__GATEWAY__PROT": "1"})


@pytest.mark.parametrize("name", ["MODELYARD__", "MODELYARD__GATEWAY", "MODELYARD__GATEWAY__PORT__X", "MODELYARD____"])
def test_odd_variable_names_are_refused_not_fatal(name: str) -> None:
    assert "Bad setting" in _refusal(None, {name: "1"})


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    refusal = _refusal(tmp_path / "none.toml")
    assert "No such file" in refusal
    assert "--config" in refusal


def test_the_data_directory_is_private_and_made_once(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "a" / "b")
    data.create()
    data.create()
    for folder in (data.root, data.running.parent, data.pepper.parent, data.journal, data.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_data_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="--data-dir"):
        DataDirectory(tmp_path / "file" / "below").create()


def test_the_default_data_directory_follows_the_environment() -> None:
    assert DataDirectory.default({"MODELYARD_DATA_DIR": "/d"}) == Path("/d")
    assert DataDirectory.default({"XDG_DATA_HOME": "/x"}) == Path("/x/modelyard")
    assert DataDirectory.default({}).parts[-3:] == (".local", "share", "modelyard")


def test_a_list_in_a_variable_is_separated_by_commas() -> None:
    name = "MODELYARD__GATEWAY__CORS_ORIGINS"
    for text, origins in {"https://a, http://b:1,": ("https://a", "http://b:1"), "*": ("*",), "": ()}.items():
        assert load(None, {name: text}).gateway.cors_origins == origins


def test_all_mistakes_are_told_at_once_each_where_it_is(tmp_path: Path) -> None:
    file = _file(tmp_path, "[gateway]\nprot = 1\nworkers = 0\n[fleet]\nkind = 'moon'\n[prices.smol]\noutptu = 1\n")
    refusal = _refusal(file, {"MODELYARD__GATEWAY__QUEUE_MAX": "many"})
    assert "gateway: unknown setting 'prot'. Did you mean 'port'?" in refusal
    assert "gateway.workers: expected integer >= 1." in refusal
    assert "fleet.kind: invalid enum value 'moon' (one of local, simulated)." in refusal
    assert "unknown setting 'outptu'. Did you mean 'output'?" in refusal
    assert "And in MODELYARD__GATEWAY__QUEUE_MAX: gateway.queue_max: expected integer" in refusal


def test_a_mistake_in_a_table_is_told_with_its_own_key_and_what_may_stand_there(tmp_path: Path) -> None:
    long = "x" * 41
    text = f"[stripe.meters]\nour_cost = 'dollars'\n{long} = 'requests'\n[prices.smol]\ninput = -1\n"
    file = _file(tmp_path, text)
    refusal = _refusal(file, {"MODELYARD__FLEET__ACCELERATOR_PRICES__H100": "cheap"})
    assert "stripe.meters.our_cost: invalid enum value 'dollars' (one of cost_nanousd, requests, " in refusal
    assert f"stripe.meters.{long}: expected text of length <= 40" in refusal
    assert "prices.smol.input: expected number >= 0" in refusal
    assert "And in MODELYARD__FLEET__ACCELERATOR_PRICES__H100: fleet.accelerator_prices.h100: expected" in refusal


@pytest.mark.parametrize(
    ("setting", "value"),
    [("COMPLETION_WINDOWS", "24h,soon"), ("COMPLETION_WINDOWS", "0h"), ("LEASE_S", "0.1"), ("SHARD_LINES", "0")],
)
def test_batches_with_windows_or_leases_that_cannot_work_are_refused_at_the_start(setting: str, value: str) -> None:
    name = f"MODELYARD__BATCH__{setting}"
    assert f"batch.{setting.lower()}" in _refusal(None, {name: value})
