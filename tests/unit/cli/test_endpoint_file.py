"""Endpoint files: read strictly, every fault with its line, and what an endpoint must change to be as its file says."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.cli.applying import change_of
from modelyard.cli.endpoint_file import lines_of_json, lines_of_toml, read_endpoint_file, with_lines
from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import Platform
from modelyard.cli.main import main
from modelyard.domain.endpoints import Autoscale

TOML = """\
# An endpoint.
name = "chat"
engine = "llamacpp"
artifact = "models/smol.gguf"

[options]
slots = 4
context_length = 4096

[hardware]
min_replicas = 0
max_replicas = 4

[scaling]
scale_to_zero = true

[serving]
sticky = "user"
timeouts.total_s = 60
"""


def test_a_file_says_what_a_request_does(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text(TOML)
    order, lines = read_endpoint_file(file)
    assert order == {
        "model_name": "chat",
        "framework": "llamacpp",
        "model_artifact": str(tmp_path / "models" / "smol.gguf"),
        "options": {"slots": 4, "context_length": 4096},
        "hardware": {"min_replicas": 0, "max_replicas": 4},
        "scaling": {"scale_to_zero": True},
        "serving": {"sticky": "user", "timeouts": {"total_s": 60}},
    }
    assert (lines["hardware.max_replicas"], lines["model_artifact"], lines["serving.timeouts.total_s"]) == (12, 4, 19)


def test_a_tier_may_be_left_to_the_traffic(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text('name = "x"\n[autoscale]\ntier = "auto"\n')
    assert read_endpoint_file(file)[0]["autoscale"] == {"tier": None}


def test_json_says_the_same_with_the_names_of_the_api(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.json"
    file.write_text('{\n "model_name": "chat",\n "framework": "simulated",\n "hardware": {\n  "min_replicas": 2}\n}')
    order, lines = read_endpoint_file(file)
    assert order == {"model_name": "chat", "framework": "simulated", "hardware": {"min_replicas": 2}}
    assert lines["hardware.min_replicas"] == 5


@pytest.mark.parametrize("artifact", ["upload:sha256:ab", "model:smol@v1", "https://host/x", "file:///x", "/x"])
def test_only_a_relative_path_is_meant_from_the_files_folder(tmp_path: Path, artifact: str) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text(f'name = "x"\nartifact = "{artifact}"\n')
    assert read_endpoint_file(file)[0]["model_artifact"] == artifact


def test_all_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text(
        'nam = "chat"\nengine = 7\n\n[hardwear]\nmin_replicas = 1\n[scaling]\nscale_to_zero = "yes"\nidle = 3\n'
        "[serving.timeouts]\ntotal = 5\n[options]\nslots = [1]\n"
    )
    with pytest.raises(Failure) as failure:
        read_endpoint_file(file)
    assert failure.value.exit_code is Exit.USAGE
    text = str(failure.value)
    assert "\n" not in text
    for told in (
        "line 1, nam: this field does not exist here",
        "line 2, engine: ",
        "line 4, hardwear: this field does not exist here; did you mean 'hardware'?",
        "line 7, scaling.scale_to_zero: ",
        "line 8, scaling.idle: ",
        "line 10, serving.timeouts.total: this field does not exist here; did you mean 'total_s'?",
        "line 12, options.slots: ",
        "name: is required",
    ):
        assert told in text, text


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.toml", b"name = ", "not valid TOML"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "holds no object"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.toml", b"\xff", "not UTF-8"),
        ("a.toml", b"#" * 2_000_000, "larger than"),
        ("a.toml", b'name = "a"\nmodel_name = "b"\n', "are the same"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(Failure, match=told) as failure:
        read_endpoint_file(file)
    assert "\n" not in str(failure.value)
    with pytest.raises(Failure, match="No such file"):
        read_endpoint_file(tmp_path / "none.toml")


def test_what_the_platform_refuses_gets_its_line_too() -> None:
    error = Refused(
        "This deployment cannot be made. model_name: use letters; hardware.max_replicas: must be 1 to 1000.",
        status=400,
        code="invalid_value",
        request_id="req_1",
    )
    told = with_lines(error, Path("e.toml"), {"model_name": 2, "hardware.max_replicas": 9})
    assert told.message == (
        "e.toml: This deployment cannot be made. line 2, name: use letters; "
        "line 9, hardware.max_replicas: must be 1 to 1000."
    )
    assert (told.status, told.request_id) == (400, "req_1")


def test_what_the_platform_refuses_is_told_in_the_order_of_the_file() -> None:
    error = Refused(
        "This deployment cannot be made. framework: there is no engine 'x' here; available: 'llamacpp'; "
        "version: use letters; options.zz: no such option; it takes slots; base: there is none.",
        status=400,
        code="invalid_value",
    )
    told = with_lines(error, Path("e.toml"), {"options": 1, "options.zz": 2, "version": 5, "framework": 7})
    assert told.message == (
        "e.toml: This deployment cannot be made. line 2, options.zz: no such option; it takes slots; "
        "line 5, version: use letters; line 7, engine: there is no engine 'x' here; available: 'llamacpp'; "
        "base: there is none."
    )


def test_bad_values_are_told_beside_bad_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text('nmae = 1\nname = "a b"\nartifact = "here.gguf"\n')
    asked: list[str] = []

    def post(_platform: Platform, path: str, _body: Any) -> Any:
        asked.append(path)
        message = (
            "This deployment cannot be made. nmae: this field does not exist here; did you mean 'name'?; "
            "framework: is required; model_artifact: a file of the host needs a key; model_name: use letters."
        )
        raise Refused(message, status=400, code="invalid_value")

    monkeypatch.setattr(Platform, "post", post)
    command = ["deploy", "-f", str(file), "--url", "http://x", "--key", "k"]
    assert main(command) == 2
    assert asked == ["/v1/models/plan"], "nothing is deployed"
    told = "line 1, nmae: this field does not exist here; did you mean 'name'?; line 2, name: use letters."
    assert capsys.readouterr().err.endswith(f"cannot be made. {told}\n")


def test_bad_fields_are_told_without_a_platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text('nmae = 1\nname = "a"\n')
    assert main(["deploy", "-f", str(file), "--url", "http://127.0.0.1:9", "--key", "k"]) == 2
    assert "line 1, nmae: this field does not exist here" in capsys.readouterr().err


def test_tables_of_an_array_have_lines_of_their_own() -> None:
    text = "a = 1\n[[v]]\nname = 1\n[v.b]\nc = 2\n[[v]]\nname = 3\nd.e = 4\n[[v.w]]\nf = 5\n[b]\nc = 6\n"
    assert lines_of_toml(text) == {
        "a": 1, "v[0]": 2, "v[0].name": 3, "v[0].b": 4, "v[0].b.c": 5, "v[1]": 6, "v[1].name": 7, "v[1].d.e": 8,
        "v[1].w[0]": 9, "v[1].w[0].f": 10, "b": 11, "b.c": 12,
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="[]{}\"\\:,.=\n ab#'", max_size=60))
def test_looking_for_lines_survives_anything(text: str) -> None:
    for lines in (lines_of_json(text), lines_of_toml(text)):
        assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


ENDPOINT: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 1,
    "scale_to_zero": False,
    "scale_to_zero_after_idle_seconds": 300.0,
    "serving": {
        "timeouts": {"connect_s": None, "first_token_s": None, "token_s": None, "total_s": None},
        "coalesce_ms": 0,
        "sticky": "none",
    },
    # As the API shows it.
    "autoscale": msgspec.json.decode(msgspec.json.encode(msgspec.structs.asdict(Autoscale()))),
}


@pytest.mark.parametrize(
    ("order", "change"),
    [
        ({}, {}),
        ({"hardware": {"min_replicas": 1}, "scaling": {"scale_to_zero": False}, "serving": {"sticky": "none"}}, {}),
        ({"hardware": {"max_replicas": 3}}, {"hardware": {"max_replicas": 3}}),
        ({"hardware": {"min_replicas": 2}}, {"hardware": {"min_replicas": 2, "max_replicas": 2}}),
        ({"scaling": {"scale_to_zero": True}}, {"scaling": {"scale_to_zero": True}}),
        ({"serving": {"timeouts": {"total_s": 9}}}, {"serving": {"timeouts": {"total_s": 9}}}),
        ({"autoscale": {"tier": "hot", "up_queue": 100}}, {"autoscale": {"tier": "hot"}}),
        # A time that is named is fixed, as in a deployment; whoever learns from it says both.
        ({"scaling": {"scale_to_zero_after_idle_seconds": 300}}, {"autoscale": {"idle": "fixed"}}),
        (
            {"scaling": {"scale_to_zero_after_idle_seconds": 60}, "autoscale": {"idle": "learned"}},
            {"scaling": {"scale_to_zero_after_idle_seconds": 60}, "autoscale": {"idle": "learned"}},
        ),
    ],
)
def test_only_what_differs_is_changed(order: dict[str, Any], change: dict[str, Any]) -> None:
    assert change_of(ENDPOINT, order) == change


def test_what_a_file_no_longer_says_goes_back_to_its_default() -> None:
    served = {"timeouts": {"total_s": 9.0, "token_s": None}, "coalesce_ms": 20, "sticky": "user"}
    rules = {**ENDPOINT["autoscale"], "tier": "warm", "idle": "fixed", "target_latency_s": 3.0}
    endpoint = {**ENDPOINT, "max_replicas": 4, "serving": served, "autoscale": rules}
    assert change_of(endpoint, {}) == {
        "hardware": {"max_replicas": 1},
        "autoscale": {"tier": None, "idle": "priced", "target_latency_s": None},
        "serving": {"coalesce_ms": 0, "sticky": "none", "timeouts": {"total_s": None}},
    }
