"""The controller against real processes: what should run, runs, whatever is killed."""

import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.models import Tensor, gguf, tiny_gguf
from tests.support.reconciling import PACE, WITHIN_S, Site, controller, open_site
from tests.support.waiting import eventually_async

from modelyard.domain.endpoints import EndpointStatus, Release, Scaling, Stage
from modelyard.domain.facts import ModelFacts
from modelyard.domain.fleet import ReplicaState
from modelyard.domain.tenants import Tenant
from modelyard.engines import EngineCommand
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet import StartOrder

SLEEPY = Scaling(min_replicas=1, max_replicas=3, scale_to_zero=True, idle_s=0.5)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(tmp_path) as opened:
        yield opened


class PickyEngine(SimulatedEngine):
    """The simulated engine, but it wants a file, and looks at it as llama.cpp does."""

    name = "picky"
    needs_artifact = True

    def check_artifact(self, file: Path) -> None:
        with file.open("rb") as reader:
            if reader.read(4) != b"GGUF":
                raise ValueError("the file is no GGUF model")


async def pid_of(site: Site, replica_id: str) -> int:
    return next(process.pid for process in await site.running() if process.replica_id == replica_id)


async def test_deployment_becomes_ready_and_is_routed_to(site: Site) -> None:
    endpoint = await site.deploy({"load_s": 0.2, "slots": 3})
    async with controller(site) as running:
        (replica,) = await site.until_ready(endpoint)
        await eventually_async(lambda: running.gateway.routed(endpoint) == [replica.id], WITHIN_S, "routed to")

        async def is_running() -> bool:
            now = await site.endpoint(endpoint)
            return now is not None and (now.status, now.progress.stage) == (EndpointStatus.RUNNING, Stage.READY)

        await eventually_async(is_running, WITHIN_S, "shown as running")
        assert running.gateway.table is not None
        (route,) = running.gateway.table.endpoints
        assert "/v1/chat/completions" in route.routes
        assert route.releases[0].replicas[0].slots == 3
        assert route.price.input == 1_000_000_000
        (measured,) = await eventually_async(
            lambda: site.store.observed_load_s(endpoint.releases[0].version_id), WITHIN_S, "its load is noted"
        )
        assert measured >= 0.2


async def test_killed_engine_is_replaced_with_a_reason(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site):
        (first,) = await site.until_ready(endpoint)
        os.kill(await pid_of(site, first.id), signal.SIGKILL)

        async def has_another() -> bool:
            return [one.id for one in await site.replicas(endpoint, ReplicaState.READY)] not in ([], [first.id])

        await eventually_async(has_another, WITHIN_S, "another replica")
        (second,) = await site.until_ready(endpoint)
        assert second.generation == first.generation + 1
        assert second.ordinal == first.ordinal
        assert second.secret != first.secret
        assert any("SIGKILL" in reason for reason in await site.reasons(endpoint, "replica_failed"))


async def test_hung_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    pace = msgspec.structs.replace(PACE, hang_timeout_s=4)
    async with open_site(tmp_path, pace=pace) as site, controller(site):
        endpoint = await site.deploy()
        (first,) = await site.until_ready(endpoint)
        os.kill(await pid_of(site, first.id), signal.SIGSTOP)

        async def has_another() -> bool:
            return [one.id for one in await site.replicas(endpoint, ReplicaState.READY)] not in ([], [first.id])

        await eventually_async(has_another, WITHIN_S, "another replica")
        await site.until_ready(endpoint)
        assert await site.reasons(endpoint, "replica_killed") == ["it gave no sign of life for 4 s"]


async def test_next_controller_adopts_what_runs(site: Site) -> None:
    endpoint = await site.deploy(scaling=Scaling(min_replicas=2, max_replicas=2))
    async with controller(site):
        before = await site.until_ready(endpoint, 2)
        pids = {process.pid for process in await site.running()}
    assert {process.pid for process in await site.running()} == pids, "engines outlive the controller"
    async with controller(site) as second:
        await eventually_async(
            lambda: sorted(second.gateway.routed(endpoint)) == sorted(one.id for one in before), WITHIN_S, "routed"
        )
        second.loops.wake()
        assert await site.until_ready(endpoint, 2) == before
        assert {process.pid for process in await site.running()} == pids
        assert len(await site.reasons(endpoint, "replica_started")) == 2


async def test_engine_that_died_unwatched_is_replaced_without_a_pause_or_a_crash(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site):
        (first,) = await site.until_ready(endpoint)
    os.kill(await pid_of(site, first.id), signal.SIGKILL)
    await site.until_none_runs()
    async with controller(site):
        (second,) = await site.until_ready(endpoint)
        assert second.id != first.id
        assert await site.reasons(endpoint, "replica_failed") == []
        assert "no controller ran" in (await site.reasons(endpoint, "replica_ended"))[0]


async def test_sleeps_when_idle_and_wakes_on_a_request(site: Site) -> None:
    endpoint = await site.deploy(scaling=SLEEPY)
    async with controller(site) as running:
        await site.until_slept(endpoint)
        asleep = await site.endpoint(endpoint)
        assert asleep is not None
        assert "asleep" in asleep.progress.reason
        running.gateway.say(endpoint, queued=1)
        (replica,) = await site.until_ready(endpoint)
        assert replica.generation == 1
        await eventually_async(lambda: running.gateway.routed(endpoint) == [replica.id], WITHIN_S, "routed again")
        running.gateway.say(endpoint)
        await site.until_none_runs()


async def test_storm_of_requests_starts_what_its_size_needs_and_no_more(site: Site) -> None:
    endpoint = await site.deploy({"slots": 4, "load_s": 0.3}, scaling=SLEEPY)
    async with controller(site) as running:
        await site.until_slept(endpoint)
        for queued in range(1, 9):
            running.gateway.say(endpoint, queued=queued)
        assert len(await site.until_ready(endpoint, 2)) == 2
        assert len(await site.reasons(endpoint, "replica_started")) == 3


async def test_replica_is_not_stopped_before_the_gateways_know_that_it_drains(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site) as running:
        (replica,) = await site.until_ready(endpoint)
        await eventually_async(lambda: running.gateway.routed(endpoint) == [replica.id], WITHIN_S, "it is routed")
        running.gateway.is_behind = True
        await site.store.put_endpoint(msgspec.structs.replace(endpoint, is_deleted=True))
        running.loops.wake()

        async def has_drained_a_while() -> bool:
            (now,) = await site.replicas(endpoint)
            assert now.state in {ReplicaState.READY, ReplicaState.DRAINING}, "a request could still come to it"
            is_draining = now.state is ReplicaState.DRAINING
            return is_draining and running.loops._parts.clock.unix_s() - now.state_since > 1.5

        await eventually_async(has_drained_a_while, WITHIN_S, "longer than a gateway takes to report")
        running.gateway.is_behind = False
        await site.store.add_tenant(Tenant("ten-new", "new", 1))
        await running.publisher.refresh()  # the next table reaches it
        await site.until_none_runs()


async def test_replica_is_not_stopped_while_requests_run_on_it(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site) as running:
        (replica,) = await site.until_ready(endpoint)
        running.gateway.say(endpoint, in_flight=1, on=replica.id)
        await site.store.put_endpoint(msgspec.structs.replace(endpoint, is_deleted=True))
        running.loops.wake()

        async def drains() -> bool:
            return bool(await site.replicas(endpoint, ReplicaState.DRAINING))

        await eventually_async(drains, WITHIN_S, "it drains")
        since = (await site.replicas(endpoint))[0].state_since

        async def has_reported() -> bool:
            (now,) = await site.replicas(endpoint)
            assert now.state is ReplicaState.DRAINING, "stopped under a running request"
            return running.loops._parts.clock.unix_s() - since > 1.5

        await eventually_async(has_reported, WITHIN_S, "longer than a gateway takes to report")
        running.gateway.say(endpoint)
        await site.until_none_runs()

        async def is_forgotten() -> bool:
            return await site.endpoint(endpoint) is None

        await eventually_async(is_forgotten, WITHIN_S, "the endpoint is forgotten")
        assert await site.fleet.observe() == []


async def test_crash_loop_backs_off_and_says_why(site: Site) -> None:
    endpoint = await site.deploy({"fail_load": True})
    async with controller(site) as running:

        async def has_failed() -> bool:
            now = await site.endpoint(endpoint)
            return now is not None and now.status is EndpointStatus.FAILED

        await eventually_async(has_failed, WITHIN_S, "shown as failed")
        failed = await site.endpoint(endpoint)
        assert failed is not None
        assert "times in a row" in failed.failure
        assert "exited with code 1" in failed.failure

        def is_told() -> bool:
            table = running.gateway.table
            return table is not None and "exited with code 1" in table.endpoints[0].failure

        await eventually_async(is_told, WITHIN_S, "gateways are told")
        starts = sorted(one.started_at for one in await site.replicas(endpoint))
        assert len(starts) >= 3
        assert starts[1] - starts[0] >= 0.1
        assert starts[2] - starts[1] >= 0.2


async def test_process_that_nobody_knows_is_ended(site: Site) -> None:
    endpoint = await site.deploy()
    for of in (endpoint.id, "ep-unknown"):
        address = await site.fleet.reserve(f"rep-stray-{of}")
        command = EngineCommand(("sleep", "600"), {})
        await site.fleet.start(StartOrder(f"rep-stray-{of}", of, address.host, address.port, "s", command))
    async with controller(site):
        (replica,) = await site.until_ready(endpoint)

        async def is_alone() -> bool:
            return [process.replica_id for process in await site.fleet.observe()] == [replica.id]

        await eventually_async(is_alone, WITHIN_S, "strays are gone")


async def test_one_endpoint_that_cannot_start_does_not_hold_up_another(site: Site) -> None:
    await site.deploy({"fail_load": True}, name="broken")
    stubborn = await site.deploy({"ignore_sigterm": True}, name="stubborn")
    async with controller(site) as running:

        async def stubborn_is_ready() -> bool:
            return bool(await site.replicas(stubborn, ReplicaState.READY))

        await eventually_async(stubborn_is_ready, WITHIN_S, "ready")
        await site.store.put_endpoint(msgspec.structs.replace(stubborn, is_deleted=True))
        running.loops.wake()
        other = await site.deploy(name="other")
        running.loops.wake()

        async def other_is_ready() -> bool:
            return bool(await site.replicas(other, ReplicaState.READY))

        await eventually_async(other_is_ready, WITHIN_S, "another deployment is ready")


async def test_artifact_that_is_no_model_fails_the_endpoint_and_heals_when_it_is_put_right(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"not a model")
    async with open_site(tmp_path, engines=[PickyEngine()]) as site:
        endpoint = await site.deploy(framework="picky", artifact=model.as_uri())
        async with controller(site):

            async def failure() -> str:
                now = await site.endpoint(endpoint)
                return now.failure if now else ""

            async def another_failure() -> str:
                now = await failure()
                return "" if now.startswith("the file is no GGUF model") else now

            first = await eventually_async(failure, WITHIN_S, "it failed")
            assert first.startswith("the file is no GGUF model; it is tried again ")
            assert await site.replicas(endpoint) == [], "nothing was started"
            model.write_bytes(b"GGUF and more")
            failed = await eventually_async(another_failure, WITHIN_S, "its header is read, too")
            assert failed.startswith("artifact_invalid: The artifact is a truncated GGUF file. Fetch it again; ")
            tiny_gguf(model)
            await site.until_ready(endpoint)
            (version,) = await site.store.versions()
            assert version.artifact.digest.startswith("sha256:")
            assert version.artifact.size_bytes == model.stat().st_size
            assert (version.facts.architecture, version.facts.kv_bytes_per_token) == ("llama", 256)
            model.unlink()
            other = await site.deploy(framework="picky", artifact=model.as_uri(), name="other")
            await eventually_async(
                lambda: _failure(site, other.id), WITHIN_S, "a copy of a file that is gone fails as well"
            )


async def test_facts_are_read_of_an_artifact_that_is_here_already(tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "model.gguf")
    async with open_site(tmp_path, engines=[PickyEngine()]) as site:
        endpoint = await site.deploy(framework="picky", artifact=model.as_uri())
        async with controller(site):
            await site.until_ready(endpoint)
        (first,) = await site.store.versions()
        model.unlink()
        again = await site.deploy(framework="picky", artifact=model.as_uri(), name="again")
        second = next(one for one in await site.store.versions() if one.id != first.id)
        assert second.facts == ModelFacts()
        await site.store.put_version(msgspec.structs.replace(second, artifact=first.artifact))
        async with controller(site):
            await eventually_async(lambda: site.replicas(again, ReplicaState.READY), WITHIN_S, "ready")
        second = next(one for one in await site.store.versions() if one.id == second.id)
        assert second.facts == first.facts
        assert second.facts.architecture == "llama"
        assert second.memory_bytes == first.memory_bytes


async def test_an_adapter_alone_is_not_served(tmp_path: Path) -> None:
    model = tmp_path / "adapter.gguf"
    keys = {"general.architecture": "llama", "general.type": "adapter", "general.base_model.0.name": "Smol"}
    model.write_bytes(gguf(keys, [Tensor("q.lora_a", (64, 8))]))
    async with open_site(tmp_path, engines=[PickyEngine()]) as site:
        endpoint = await site.deploy(framework="picky", artifact=model.as_uri())
        async with controller(site):
            failure = await eventually_async(lambda: _failure(site, endpoint.id), WITHIN_S, "it failed")
            assert failure.startswith("it is a LoRA adapter of 'Smol', which is loaded onto a version of its base")
            assert await site.replicas(endpoint) == []


async def _failure(site: Site, endpoint_id: str) -> str:
    return next(one.failure for one in await site.store.endpoints() if one.id == endpoint_id)


async def test_unknown_engine_is_said_and_starts_nothing(site: Site) -> None:
    endpoint = await site.deploy(framework="vllm")
    async with controller(site):
        failure = await eventually_async(lambda: _failure(site, endpoint.id), WITHIN_S, "it failed")
        assert failure == "there is no engine 'vllm' here; there are 'simulated'"
        assert await site.replicas(endpoint) == []


async def test_another_version_takes_over_without_a_gap(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site) as running:
        (old,) = await site.until_ready(endpoint)
        await eventually_async(lambda: running.gateway.routed(endpoint) == [old.id], WITHIN_S, "routed")
        (version,) = await site.store.versions()
        newer = msgspec.structs.replace(version, id="ver-newer", version="v2", options={"load_s": 0.5})
        await site.store.add_version(newer)
        present = await site.endpoint(endpoint)
        assert present is not None
        await site.store.put_endpoint(msgspec.structs.replace(present, releases=(Release(newer.id),)))
        running.loops.wake()
        seen: list[list[str]] = []

        async def has_taken_over() -> bool:
            seen.append(running.gateway.routed(endpoint))
            return seen[-1] != [old.id] and len(seen[-1]) == 1

        await eventually_async(has_taken_over, WITHIN_S, "the new version serves alone")
        assert [] not in seen, "nobody served for a while"
        (new,) = await site.until_ready(endpoint)
        assert new.version_id == newer.id


async def test_locked_database_stops_no_engine_and_heartbeats_say_so(site: Site) -> None:
    endpoint = await site.deploy()
    async with controller(site) as running:
        await site.until_ready(endpoint)
        heartbeat = await eventually_async(
            lambda: (beat := running.gateway.heartbeat) and beat.is_authoritative, WITHIN_S, "authoritative"
        )
        assert heartbeat
        lock = sqlite3.connect(site.root / "control.sqlite", isolation_level=None)
        try:
            lock.execute("BEGIN IMMEDIATE")
            await eventually_async(
                lambda: (beat := running.gateway.heartbeat) and not beat.is_authoritative, WITHIN_S, "not authoritative"
            )
            assert len(await site.running()) == 1
        finally:
            lock.close()
        await eventually_async(
            lambda: (beat := running.gateway.heartbeat) and beat.is_authoritative, WITHIN_S, "authoritative again"
        )
        await site.until_ready(endpoint)
