"""Adapters of many tenants on a shared base: deployed in moments, called by their own names, metered apart."""

import json
import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.customers import Customer
from tests.support.waiting import eventually
from tests.support.yard import Yard

SEATS = 3


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with Yard(tmp_path_factory.mktemp("guests")) as yard:
        yard.deploy("base", options={"max_adapters": SEATS, "slots": 4}, shared=True)
        yield yard


def models_of(yard: Yard, event: str) -> list[str]:
    return [str(record["model"]) for record in yard.journal() if record["event"] == event]


def test_three_tenants_call_their_own_adapters_of_a_shared_base_and_are_metered_apart(yard: Yard) -> None:
    tenants = [Customer(yard, f"metered-{number}") for number in range(3)]
    for number, tenant in enumerate(tenants):
        began_s = time.monotonic()
        reply = tenant.deploy("bot")
        assert reply.status == 202, reply.body
        assert reply.json()["estimated_ready_seconds"] <= 5
        answer = tenant.ask("bot", "one two three four", max_tokens=number + 1)
        assert answer.status == 200, answer.body
        print(f"from deploy to first answer: {time.monotonic() - began_s:.3f} s")
        assert answer.json()["model"] == "bot", "its own name, not the engine's"
        eventually(lambda tenant=tenant: tenant.endpoint("bot")["status"] == "running", 30, "it is said to be ready")
        endpoint = tenant.endpoint("bot")
        assert (endpoint["host"], endpoint["current_replicas"]) == ("base", 1)
        row = yard.row_of(answer.headers["x-request-id"])
        assert (row["customer_id"], row["model_name"], row["completion_tokens"]) == (tenant.id, "bot", number + 1)
    assert len(yard.engines()) == 1, "no further replica was started"
    begun = [str(record["model"]) for record in yard.journal() if record["event"] == "begin"]
    assert len({name for name in begun if name.startswith("bot@")}) == 3, "to the engine each has a name of its own"
    for tenant in tenants:
        tenant.drop("bot")


def test_what_another_tenant_has_does_not_exist(yard: Yard) -> None:
    owner, other = Customer(yard, "owner"), Customer(yard, "other")
    assert owner.deploy("secret").status == 202
    assert owner.ask("secret").status == 200
    engine_name = models_of(yard, "adapter_loaded")[-1]
    assert engine_name.startswith("secret@")
    for model in ("secret", engine_name, f"owner/{engine_name}"):
        for caller in (other, owner) if model != "secret" else (other,):
            assert caller.ask(model).status == 404, f"{caller.name} asked for {model}"
    endpoint_id = owner.endpoint("secret")["id"]
    for path in ("secret", endpoint_id):
        assert other.call("GET", f"/v1/endpoints/{path}").status == 404
        assert other.call("DELETE", f"/v1/endpoints/{path}").status == 404
        assert other.call("GET", f"/v1/endpoints/{path}/why").status == 404
    for order, param in (
        ({"host": "secret"}, "host"),
        ({"host": endpoint_id}, "host"),
        ({"base": "secret@v1"}, "base"),
        ({"model_artifact": "model:secret@v1", "base": ""}, "model_artifact"),
    ):
        reply = other.deploy("mine", **order)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.body
        assert "owner" not in reply.body.decode()
    private = yard.call("GET", "/v1/endpoints/base").json()
    assert [guest["name"] for guest in private["guests"]] == [""], "whose it is, is not the host's owner's to know"
    owner.drop("secret")


def test_beyond_the_seats_the_least_recently_used_goes_and_comes_back_when_asked(yard: Yard) -> None:
    tenant = Customer(yard, "many")
    names = [f"lru-{number}" for number in range(SEATS + 2)]
    for name in names:
        assert tenant.deploy(name).status == 202
        assert tenant.ask(name).status == 200
    loaded = models_of(yard, "adapter_loaded")
    assert len(set(loaded)) == len(loaded), "nobody was loaded twice"

    def seated() -> set[str]:
        every = tenant.call("GET", "/v1/endpoints").json()["data"]
        return {one["name"] for one in every if one["current_replicas"]}

    eventually(lambda: seated() == set(names[-SEATS:]), 30, "the last ones sit")
    eventually(lambda: tenant.endpoint(names[0])["status"] == "stopped", 30, "the first is let go")
    began_s = time.monotonic()
    assert tenant.ask(names[0]).status == 200
    print(f"a guest that was let go, asked again: {time.monotonic() - began_s:.3f} s")
    eventually(lambda: names[0] in seated() and names[2] not in seated(), 30, "it took the seat of the oldest")
    assert len(yard.engines()) == 1
    tenant.drop(*names)


def test_a_controller_that_starts_anew_knows_who_sits_where(yard: Yard) -> None:
    tenant = Customer(yard, "restarted")
    assert tenant.deploy("kept").status == 202
    assert tenant.ask("kept").status == 200
    before = models_of(yard, "adapter_loaded")
    (control,) = yard.plane_pids("control")
    yard.kill(control)
    assert tenant.ask("kept").status == 200, "the gateway goes on without"
    eventually(lambda: yard.plane_pids("control") not in ([], [control]), 40, "the next controller")
    eventually(lambda: tenant.call("GET", "/v1/endpoints/kept").status == 200, 40, "it answers")
    assert tenant.ask("kept").status == 200
    assert tenant.endpoint("kept")["current_replicas"] == 1
    assert models_of(yard, "adapter_loaded") == before, "nothing was loaded again"
    tenant.drop("kept")


def test_a_replica_that_crashes_comes_back_with_its_guests(yard: Yard) -> None:
    tenant = Customer(yard, "crashed")
    assert tenant.deploy("survivor").status == 202
    assert tenant.ask("survivor").status == 200
    (engine,) = yard.engines("base")
    yard.signal(engine.pid, signal.SIGKILL)
    answers = eventually(lambda: tenant.ask("survivor").status == 200, 80, "it answers again")
    assert answers
    assert models_of(yard, "adapter_loaded")[-2:] == [models_of(yard, "adapter_loaded")[-1]] * 2
    tenant.drop("survivor")


def test_a_host_that_guests_sit_on_is_not_deleted_by_mistake(yard: Yard) -> None:
    tenant = Customer(yard, "sitting")
    assert tenant.deploy("sitter").status == 202
    reply = yard.call("DELETE", "/v1/endpoints/base")
    assert reply.status == 409
    assert "1 guests sit" in reply.json()["error"]["message"]
    operator = Customer(yard, "operator")
    operator.key = yard.admin_key
    told = operator.modelyard("endpoints", "rm", "base").stderr
    assert "delete it with --force" in told
    assert "?force" not in told
    version = yard.call("GET", "/v1/registry/models/base@v1").json()["id"]
    assert yard.call("DELETE", f"/v1/registry/models/{version}").status == 409
    tenant.drop("sitter")


def test_a_guest_that_the_engine_refuses_says_why_under_its_own_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Yard(tmp_path_factory.mktemp("yard")) as yard:
        yard.deploy("base", options={"max_adapters": 2, "fail_adapters": "bad"}, shared=True)
        tenant = Customer(yard, "refused")
        assert tenant.deploy("bad").status == 202
        eventually(lambda: tenant.endpoint("bad")["status"] == "failed", 40, "it failed")
        reply = tenant.ask("bad")
        message = reply.json()["error"]["message"]
        assert (reply.status, reply.json()["error"]["code"]) == (503, "model_failed")
        assert "The adapter `bad` does not fit, as option fail_adapters asks. See" in message
        answers = tenant.call("GET", "/v1/endpoints/bad/why").json()["answers"]
        assert "does not fit" in answers[0]["answer"]
        assert "add-release bad" in answers[0]["next_step"]
        assert "seats are taken" not in answers[1]["answer"]
        assert "bad@" not in json.dumps(answers)
        assert yard.call("DELETE", "/v1/endpoints/base?force=true").status == 202

        def is_told() -> bool:
            steps = [one["next_step"] for one in tenant.call("GET", "/v1/endpoints/bad/why").json()["answers"]]
            return any("modelyard deploy model:bad --on HOST --name bad" in step for step in steps)

        eventually(is_told, 30, "the next step is a command")


def test_a_guest_says_where_it_sits_and_not_what_its_host_takes(yard: Yard) -> None:
    tenant = Customer(yard, "placed")
    assert tenant.deploy("placed").status == 202
    assert tenant.ask("placed").status == 200
    answers = tenant.call("GET", "/v1/endpoints/placed/why").json()["answers"]
    [place] = [one["answer"] for one in answers if one["question"] == "Where does it run?"]
    assert "of its host" in place
    assert "GiB" not in place
    tenant.drop("placed")


def test_a_guest_has_no_replicas_of_its_own_to_size(yard: Yard) -> None:
    tenant = Customer(yard, "sized")
    reply = tenant.deploy("sized", hardware={"min_replicas": 2, "max_replicas": 2})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "hardware")
    assert tenant.deploy("sized").status == 202
    reply = tenant.call("PATCH", "/v1/endpoints/sized", {"hardware": {"min_replicas": 2, "max_replicas": 2}})
    assert reply.status == 400
    tenant.drop("sized")


def test_a_canary_of_another_adapter_gets_its_share(yard: Yard) -> None:
    tenant = Customer(yard, "canary")
    assert tenant.deploy("two").status == 202
    assert tenant.ask("two").status == 200
    order = {"framework": "simulated", "base": "base@v1", "weight": 50}
    reply = tenant.call("POST", "/v1/endpoints/two/releases", order)
    assert reply.status == 202, reply.body
    eventually(lambda: tenant.endpoint("two")["current_replicas"] == 2, 30, "both versions sit")

    def are_both_used() -> bool:
        assert tenant.ask("two").status == 200
        begun = [str(record["model"]) for record in yard.journal() if record["event"] == "begin"]
        return len({name for name in begun if name.startswith("two@")}) == 2

    eventually(are_both_used, 30, "each has its share, once the gateway knows of both")
    tenant.drop("two")


def test_a_request_for_a_guest_wakes_its_host_from_zero(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Yard(tmp_path_factory.mktemp("yard")) as yard:
        scaling = {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1}
        yard.deploy("base", options={"max_adapters": 2}, shared=True, scaling=scaling, wait=False)
        tenant = Customer(yard, "sleeper")
        reply = tenant.deploy("bot")
        assert reply.status == 202, reply.body
        assert tenant.ask("bot").status == 200
        eventually(lambda: not yard.engines(), 40, "the host sleeps when its guests are idle")
        eventually(lambda: tenant.endpoint("bot")["status"] == "stopped", 30, "so does the guest")
        began_s = time.monotonic()
        assert tenant.ask("bot").status == 200
        print(f"a guest of a host at zero: {time.monotonic() - began_s:.3f} s")


def test_without_a_host_it_is_said_what_to_type(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Yard(tmp_path_factory.mktemp("yard")) as yard:
        yard.deploy("plain", shared=True)
        tenant = Customer(yard, "lonely")
        reply = tenant.deploy("bot", base="plain@v1")
        message = reply.json()["error"]["message"]
        assert (reply.status, reply.json()["error"]["param"]) == (400, "base")
        assert "'plain' has no seats for guests: set its option max_adapters" in message
        assert "modelyard deploy --engine simulated --name plain-host --option max_adapters=8" in message


def test_a_host_that_gets_other_options_keeps_its_guests_answering(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Yard(tmp_path_factory.mktemp("yard")) as yard:
        yard.deploy("base", options={"max_adapters": 4, "adapter_load_s": 0.5}, shared=True)
        tenant = Customer(yard, "steady")
        assert tenant.deploy("bot").status == 202
        assert tenant.ask("bot").status == 200
        options = {"max_adapters": 4, "adapter_load_s": 0.5, "slots": 2, "journal": str(yard.folder / "tokens/2.jsonl")}
        order = {"framework": "simulated", "options": options, "weight": 100}
        (before,) = yard.engines("base")
        reply = yard.call("POST", "/v1/endpoints/base/releases", order)
        assert reply.status == 202, reply.body
        statuses, slowest_s = [], 0.0

        def is_over() -> bool:
            nonlocal slowest_s
            began_s = time.monotonic()
            statuses.append(tenant.ask("bot").status)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            return before.pid not in [engine.pid for engine in yard.engines()]

        eventually(is_over, 60, "the new version took over")
        assert set(statuses) == {200}
        print(f"slowest of {len(statuses)} requests during the change of options: {slowest_s:.3f} s")
        loaded = [record for record in yard.journal() if record["event"] == "adapter_loaded"]
        assert len({record["pid"] for record in loaded}) == 2, "it was loaded onto the new replica"
        # The old one drained only after the new one had the guest, and was known for it.
        events = yard.get("/v1/endpoints/base/events?limit=200")["data"]
        (drained_at,) = [one["at"] for one in events if one["kind"] == "replica_draining"]
        # Events have whole seconds.
        assert int(max(one["t"] for one in loaded)) <= drained_at, "callers were let to it once its guest was there"
        reply = yard.call("POST", "/v1/endpoints/base/releases", {**order, "framework": "llamacpp"})
        assert reply.status == 400
