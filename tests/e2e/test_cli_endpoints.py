"""Endpoints are changed, and get and lose releases, from the command line."""

import json

from tests.e2e.test_cli_commands import out, run
from tests.support.waiting import eventually
from tests.support.yard import Yard


def test_an_endpoint_is_deployed_changed_and_shown_as_it_is_served(yard: Yard) -> None:
    out(
        yard,
        *("deploy", "--name", "demo", "--engine", "simulated", "--wait"),
        *("--engine-timeout", "first_token=60", "--coalesce-ms", "20", "--sticky", "user"),
    )
    shown = out(yard, "endpoints", "demo")
    assert "first_token within 60 s, tokens in groups of 20 ms, sticky by user" in shown
    told = out(yard, "endpoints", "set", "demo", "--engine-timeout", "first_token=default", "--scale", "0..3")
    assert told.startswith("Changed 'demo'.")
    view = json.loads(out(yard, "endpoints", "show", "demo", "--json"))
    assert view["serving"]["timeouts"]["first_token_s"] is None
    assert (view["serving"]["coalesce_ms"], view["max_replicas"], view["scale_to_zero"]) == (20, 3, True)
    assert run(yard, "endpoints", "set", "demo").returncode == 2
    refused = run(yard, "endpoints", "set", "demo", "--engine-timeout", "token=500")
    assert (refused.returncode, "raise that too" in refused.stderr) == (2, True)
    missing = run(yard, "endpoints", "set", "demmo", "--sticky", "none")
    assert (missing.returncode, "demo" in missing.stderr) == (3, True)


def test_releases_come_get_a_share_and_go(yard: Yard) -> None:
    out(yard, "deploy", "--name", "canary", "--engine", "simulated", "--wait")
    told = out(yard, "endpoints", "add-release", "canary", "--engine", "simulated", "--shadow", "10")
    assert told.startswith("Added v2 to 'canary': copies of 10 %.")
    eventually(lambda: yard.ready_replicas("canary") == 2, 60, "both run")
    out(yard, "endpoints", "set", "canary", "--weight", "v2=25")
    shown = out(yard, "endpoints", "canary")
    assert "75 %" in shown
    assert "25 %" in shown
    run(yard, "endpoints", "rm-release", "canary", "v1")
    assert "RELEASE" not in out(yard, "endpoints", "canary")
    (left,) = json.loads(out(yard, "endpoints", "show", "canary", "--json"))["releases"]
    assert (left["version"], left["weight"]) == ("v2", 100)
    last = run(yard, "endpoints", "rm-release", "canary", "v2")
    assert (last.returncode, "no other release has traffic" in last.stderr) == (1, True)
    assert run(yard, "run", "canary", "hello").returncode == 0


def test_a_canary_is_watched_promoted_and_undone(yard: Yard) -> None:
    out(yard, "deploy", "--name", "roll", "--engine", "simulated", "--wait")
    told = out(yard, "canary", "set", "roll", "10", "--engine", "simulated", "--manual", "--keep", "1m")
    assert told.startswith("'roll' v1 -> v2: running at 0 %, on the way to 10 %.")
    eventually(lambda: "at 10 %" in out(yard, "rollout", "status", "roll"), 60, "v2 has its share")
    assert "its mode is manual" in out(yard, "rollout", "status", "roll")
    other = run(yard, "canary", "set", "roll", "10", "--engine", "simulated", "--version", "v3")
    assert (other.returncode, "promote it or roll it back first" in other.stderr) == (1, True)
    assert "paused at 10 %" in out(yard, "rollout", "pause", "roll")
    assert "running at 10 %" in out(yard, "canary", "resume", "roll")
    assert out(yard, "canary", "promote", "roll").startswith("'roll' v1 -> v2: running at 10 %, on the way to 100 %.")
    watched = run(yard, "rollout", "status", "roll", "--watch")
    assert (watched.returncode, "promoted at 100 %" in watched.stdout) == (0, True), watched
    assert "v1 until" in watched.stdout, "what is kept is told"
    assert "Rollout" in out(yard, "endpoints", "roll")
    assert out(yard, "rollback", "roll").startswith("'roll' v1 -> v2: rolled back.")
    state = json.loads(out(yard, "rollout", "status", "roll", "--json"))
    assert (state["state"], state["reason"].startswith("asked for with key")) == ("rolled_back", True)
    assert run(yard, "rollout", "status", "roll", "--watch").returncode == 1, "scripts notice"
    missing = run(yard, "rollback", "rol")
    assert (missing.returncode, "Did you mean 'roll'?" in missing.stderr) == (3, True)
