"""Every fleet keeps the contract of ``modelyard.fleet``; the processes in here are real and small."""

import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.waiting import eventually, eventually_async

from modelyard.clock import SystemClock
from modelyard.domain.nodes import Part, Placement
from modelyard.engines import EngineCommand, LaunchSpec, Options
from modelyard.engines.simulated import SimulatedEngine
from modelyard.fleet import Fleet, FleetError, Observed, StartOrder, processes, simulated
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.fleet.records import LOG_BYTES_MAX, LOGS_KEPT
from modelyard.fleet.simulated import SimulatedFleet

SLEEP = ("sleep", "60")
FAILS = ("sh", "-c", "exit 1")
STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
FAMILY = ("sh", "-c", "sleep 61 & echo $! > child; exec sleep 60")
ENVIRONMENT = (sys.executable, "-c", "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[LocalFleet]:
    yield LocalFleet(tmp_path / "replicas", SystemClock())
    stop_all(tmp_path / "replicas", 0.0)


@dataclass(frozen=True)
class Kind:
    """One kind of fleet, with programs that it can run by what they do."""

    root: Path
    is_simulated: bool

    def open(self) -> Fleet:
        make = SimulatedFleet if self.is_simulated else LocalFleet
        return make(self.root, SystemClock())

    async def start(self, fleet: Fleet, program: tuple[str, ...] = SLEEP, *, replica_id: str = "r-1") -> StartOrder:
        if not self.is_simulated:
            return await start(fleet, program, replica_id=replica_id)
        address = await fleet.reserve(replica_id)
        options: Options = {SLEEP: {}, STUBBORN: {"ignore_sigterm": True}, FAILS: {"fail_load": True}}[program]
        spec = LaunchSpec(
            replica_id=replica_id,
            model_name="m",
            artifact=None,
            host=address.host,
            port=address.port,
            secret="a-secret",
            slots=4,
            context_length=1024,
            threads=1,
            options=options,
            work_dir=Path(address.work_dir),
        )
        command = SimulatedEngine().command(spec)
        order = StartOrder(replica_id, "ep-1", address.host, address.port, "a-secret", command)
        await fleet.start(order)
        return order

    def stop_all(self, grace_s: float) -> None:
        (simulated.stop_all if self.is_simulated else stop_all)(self.root, grace_s)


@pytest.fixture(params=["local", "simulated"])
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    found = Kind(tmp_path / "replicas", is_simulated=request.param == "simulated")
    yield found
    found.stop_all(0.0)


@pytest.fixture
def either(kind: Kind) -> Fleet:
    """A fleet of every kind in turn."""
    return kind.open()


async def start(
    fleet: Fleet,
    argv: tuple[str, ...],
    *,
    replica_id: str = "r-1",
    placement: Placement = Placement(),  # noqa: B008 - a frozen value
    **env: str,
) -> StartOrder:
    address = await fleet.reserve(replica_id)
    order = StartOrder(
        replica_id=replica_id,
        endpoint_id="ep-1",
        host=address.host,
        port=address.port,
        secret="a-secret",
        command=EngineCommand(argv=argv, env=env),
        placement=placement,
    )
    await fleet.start(order)
    return order


async def seen(fleet: Fleet, replica_id: str = "r-1") -> Observed:
    return next(replica for replica in await fleet.observe() if replica.replica_id == replica_id)


async def ended(fleet: Fleet, replica_id: str = "r-1") -> Observed:
    async def look() -> Observed | None:
        replica = await seen(fleet, replica_id)
        return None if replica.is_running else replica

    return await eventually_async(look, 30, f"{replica_id} has ended")


async def lines(fleet: Fleet, replica_id: str = "r-1") -> list[str]:
    return [line async for line in fleet.log_lines(replica_id, follow=False)]


async def test_a_reserved_address_is_private_and_the_same_again(either: Fleet, tmp_path: Path) -> None:
    address = await either.reserve("r-1")
    assert address.host == "127.0.0.1"
    assert await either.reserve("r-1") == address
    other = await either.reserve("r-2")
    assert other.port != address.port
    assert other.work_dir != address.work_dir
    assert stat.S_IMODE((tmp_path / "replicas" / "r-1").stat().st_mode) == 0o700


async def test_a_reserved_port_that_a_stranger_took_is_replaced(either: Fleet) -> None:
    address = await either.reserve("r-1")
    with socket.create_server((address.host, address.port)):
        assert (await either.reserve("r-1")).port != address.port


async def test_an_id_that_leads_out_of_the_folder_is_refused(either: Fleet) -> None:
    for wrong in ("../x", "a/b", ".logs", "", "a" * 200):
        with pytest.raises(ValueError, match="no replica id"):
            await either.reserve(wrong)


async def test_a_started_replica_is_observed_with_all_that_was_ordered(kind: Kind, either: Fleet) -> None:
    order = await kind.start(either)
    replica = await seen(either)
    assert replica.is_running
    assert replica.pid > 0
    assert replica.exit_reason == ""
    wanted = (order.replica_id, order.endpoint_id, order.host, order.port, order.secret)
    assert (replica.replica_id, replica.endpoint_id, replica.host, replica.port, replica.secret) == wanted


async def test_starting_a_running_replica_again_changes_nothing(kind: Kind, either: Fleet) -> None:
    order = await kind.start(either)
    before = await seen(either)
    await either.start(order)
    assert await seen(either) == before


async def test_a_replica_that_ended_can_be_started_again(fleet: LocalFleet) -> None:
    order = await start(fleet, ("true",))
    first = await ended(fleet)
    await fleet.start(order)
    assert (await ended(fleet)).pid != first.pid


async def test_a_second_controller_adopts_what_the_first_started(kind: Kind, either: Fleet) -> None:
    order = await kind.start(either)
    before = await seen(either)
    second = kind.open()
    assert await second.observe() == [before]
    await second.start(order)
    assert await second.observe() == [before]
    assert (await second.reserve("r-1")).port == order.port
    await second.stop("r-1", grace_s=5)
    assert not (await seen(second)).is_running
    assert not (await seen(either)).is_running


async def test_a_start_that_a_dying_controller_did_not_finish_is_found(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, SLEEP)
    before = await seen(fleet)
    file = tmp_path / "replicas" / "r-1" / "process.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 0, "start_time": 0}))
    adopted = await seen(LocalFleet(tmp_path / "replicas", SystemClock()))
    assert adopted == before


async def test_a_start_that_never_happened_reads_as_ended(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, SLEEP)
    await fleet.stop("r-1", grace_s=5)
    file = tmp_path / "replicas" / "r-1" / "process.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 0, "start_time": 0, "exit_reason": ""}))
    replica = await seen(fleet)
    assert not replica.is_running
    assert replica.exit_reason == "the controller ended while starting it"


async def test_a_pid_that_was_given_to_another_process_is_not_the_replica(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, SLEEP)
    file = tmp_path / "replicas" / "r-1" / "process.json"
    real = json.loads(file.read_text())
    file.write_text(json.dumps({**real, "start_time": real["start_time"] - 7}))
    second = LocalFleet(tmp_path / "replicas", SystemClock())
    assert not (await seen(second)).is_running
    await second.stop("r-1", grace_s=0)
    assert processes.is_alive(real["pid"], real["start_time"]), "a stranger with the same pid must not be killed"
    file.write_text(json.dumps(real))


async def test_a_replica_of_another_installation_is_never_taken_for_ours(fleet: LocalFleet, tmp_path: Path) -> None:
    other = LocalFleet(tmp_path / "other", SystemClock())
    await start(other, SLEEP)
    await start(fleet, ("true",))
    await ended(fleet)
    file = tmp_path / "replicas" / "r-1" / "process.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pid": 0, "start_time": 0, "exit_reason": ""}))
    assert not (await seen(fleet)).is_running
    assert (await seen(other)).is_running
    stop_all(tmp_path / "other", 0.0)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("sh", "-c", "exit 3"), "exited with code 3"),
        (("true",), "exited with code 0"),
        (("sh", "-c", "kill -KILL $$"), "killed by SIGKILL"),
        (("sh", "-c", "kill -SEGV $$"), "killed by SIGSEGV"),
    ],
)
async def test_the_exit_reason_says_how_it_ended(fleet: LocalFleet, argv: tuple[str, ...], reason: str) -> None:
    await start(fleet, argv)
    assert (await ended(fleet)).exit_reason == reason
    assert (await seen(fleet)).exit_reason == reason


async def test_a_killed_replica_is_seen_as_ended(kind: Kind, either: Fleet) -> None:
    await kind.start(either)
    os.kill((await seen(either)).pid, signal.SIGKILL)
    assert (await ended(either)).exit_reason.endswith("killed by SIGKILL")


async def test_a_program_that_does_not_exist_is_an_error_with_a_reason(fleet: LocalFleet) -> None:
    with pytest.raises(FleetError, match="cannot be started: No such file"):
        await start(fleet, ("no-such-program-anywhere",))
    replica = await seen(fleet)
    assert not replica.is_running
    assert "cannot be started" in replica.exit_reason


async def test_stop_ends_the_replica_and_may_be_repeated(kind: Kind, either: Fleet) -> None:
    await kind.start(either)
    await either.stop("r-1", grace_s=5)
    replica = await seen(either)
    assert not replica.is_running
    assert replica.exit_reason == "stopped"
    await either.stop("r-1", grace_s=5)
    await either.stop("r-never-was", grace_s=5)


async def test_stop_kills_what_ignores_the_request(fleet: LocalFleet) -> None:
    await start(fleet, STUBBORN)
    await eventually_async(lambda: lines(fleet), 20, "the trap is set")
    pid = (await seen(fleet)).pid
    started = processes.start_time(pid)
    await fleet.stop("r-1", grace_s=0.2)
    assert not processes.is_alive(pid, started)


async def test_stop_kills_a_replica_that_hangs(fleet: LocalFleet) -> None:
    await start(fleet, SLEEP)
    os.kill((await seen(fleet)).pid, signal.SIGSTOP)
    await fleet.stop("r-1", grace_s=0.1)
    assert (await seen(fleet)).exit_reason == "stopped"


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_processes_that_the_engine_started_end_with_it(fleet: LocalFleet, tmp_path: Path, how: str) -> None:
    await start(fleet, FAMILY)
    child_file = tmp_path / "replicas" / "r-1" / "child"
    child = int(eventually(child_file.read_text, 20, "the child's pid"))
    started = processes.start_time(child)
    if how == "stop":
        await fleet.stop("r-1", grace_s=5)
    else:
        os.kill((await seen(fleet)).pid, signal.SIGKILL)
        await ended(fleet)
    eventually(lambda: not processes.is_alive(child, started), 20, "the engine's child has ended")


async def test_the_environment_has_nothing_of_the_platform(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD__SECRET", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    await start(fleet, ENVIRONMENT, ENGINE_SECRET="z")
    await ended(fleet)
    environment, folder = json.loads((await lines(fleet))[0])
    assert set(environment) - {"LC_CTYPE"} == {"PATH", "HOME", "LANG", "REPLICA_ID", "ENGINE_SECRET"}
    assert environment["HOME"] == folder == (await fleet.reserve("r-1")).work_dir


async def test_there_is_at_least_one_node_with_an_accelerator_and_the_order_stays(either: Fleet) -> None:
    nodes = await either.nodes()
    assert any(seen.is_ready and seen.node.accelerators for seen in nodes)
    ids = [seen.node.id for seen in nodes]
    assert len(set(ids)) == len(ids)
    for seen in nodes:
        indices = [accelerator.index for accelerator in seen.node.accelerators]
        assert len(set(indices)) == len(indices)
        assert all(accelerator.memory_bytes > 0 for accelerator in seen.node.accelerators)
    assert [seen.node.id for seen in await either.nodes()] == ids


@pytest.mark.parametrize(
    ("parts", "visible"),
    [
        ((Part("local", (2, 3), 1),), "1,2"),
        ((Part("local", (0,), 1),), ""),
        ((Part("simulated-node", (2,), 1),), ""),
    ],
)
async def test_an_engine_sees_the_accelerators_of_its_placement_and_no_others(
    fleet: LocalFleet, parts: tuple[Part, ...], visible: str
) -> None:
    await start(fleet, ENVIRONMENT, placement=Placement(parts))
    await ended(fleet)
    environment, _ = json.loads((await lines(fleet))[0])
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


async def test_the_record_is_private_because_it_holds_the_secret(kind: Kind, either: Fleet, tmp_path: Path) -> None:
    await kind.start(either)
    for file in (tmp_path / "replicas" / "r-1").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file.name


async def test_a_replica_leads_its_own_session(fleet: LocalFleet) -> None:
    await start(fleet, SLEEP)
    pid = (await seen(fleet)).pid
    assert os.getsid(pid) == os.getpgid(pid) == pid


async def test_a_forgotten_replica_is_gone_and_its_log_is_kept(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, ("sh", "-c", "echo one; echo two >&2"))
    await ended(fleet)
    await fleet.forget("r-1")
    await fleet.forget("r-1")
    assert await fleet.observe() == []
    assert not (tmp_path / "replicas" / "r-1").exists()
    assert sorted(await lines(fleet)) == ["one", "two"]


async def test_a_running_replica_is_not_forgotten(kind: Kind, either: Fleet) -> None:
    await kind.start(either)
    with pytest.raises(FleetError, match="still runs"):
        await either.forget("r-1")


async def test_only_the_newest_logs_are_kept(either: Fleet, tmp_path: Path) -> None:
    for number in range(LOGS_KEPT + 3):
        log = Path((await either.reserve(f"r-{number}")).work_dir) / "engine.log"
        log.write_text(f"{number}\n")
        os.utime(log, (number, number))
        await either.forget(f"r-{number}")
    kept = {file.stem for file in (tmp_path / "replicas" / ".logs").iterdir()}
    assert kept == {f"r-{number}" for number in range(3, LOGS_KEPT + 3)}


async def test_the_log_is_followed_while_it_grows_until_the_replica_is_forgotten(fleet: LocalFleet) -> None:
    await start(fleet, ("sh", "-c", "echo first; while [ ! -e go ]; do sleep 0.02; done; echo second"))
    log = fleet.log_lines("r-1", follow=True)
    assert await anext(log) == "first"
    (Path((await fleet.reserve("r-1")).work_dir) / "go").touch()
    assert await anext(log) == "second"
    await ended(fleet)
    await fleet.forget("r-1")
    assert [line async for line in log] == []


async def test_a_log_that_is_too_long_starts_again_and_loses_nothing(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, SLEEP)
    log = tmp_path / "replicas" / "r-1" / "engine.log"
    with log.open("ab") as file:
        file.truncate(LOG_BYTES_MAX)
        file.write(b"\nbefore\n")
    await fleet.observe()
    with log.open("ab") as file:
        file.write(b"after\n")
    found = await lines(fleet)
    assert found[-2:] == ["before", "after"]
    assert log.stat().st_size < 100


async def test_stop_all_ends_every_replica_without_a_controller(fleet: LocalFleet, tmp_path: Path) -> None:
    await start(fleet, SLEEP, replica_id="r-1")
    await start(fleet, STUBBORN, replica_id="r-2")
    await eventually_async(lambda: lines(fleet, "r-2"), 20, "the trap is set")
    pids = [(replica.pid, processes.start_time(replica.pid)) for replica in await fleet.observe()]
    stop_all(tmp_path / "replicas", 0.3)
    assert not any(processes.is_alive(pid, started) for pid, started in pids)
    assert [replica.exit_reason for replica in await fleet.observe()] == ["stopped", "stopped"]
    stop_all(tmp_path / "nothing-here", 0.3)


async def test_stop_all_ends_what_ran_whatever_its_kind(kind: Kind, either: Fleet) -> None:
    for replica_id in ("r-1", "r-2"):
        await kind.start(either, replica_id=replica_id)
    kind.stop_all(5.0)
    assert [replica.exit_reason for replica in await either.observe()] == ["stopped", "stopped"]
    assert [replica.exit_reason for replica in await kind.open().observe()] == ["stopped", "stopped"]


async def test_a_stubborn_replica_is_ended_after_its_grace_whatever_its_kind(kind: Kind, either: Fleet) -> None:
    await kind.start(either, STUBBORN)
    await either.stop("r-1", grace_s=0.1)
    assert (await seen(either)).exit_reason == "stopped"


async def test_a_replica_that_fails_by_itself_says_how_and_can_be_started_again(kind: Kind, either: Fleet) -> None:
    await kind.start(either, FAILS)
    assert (await ended(either)).exit_reason == "exited with code 1"
    await kind.start(either)
    assert (await seen(either)).is_running


async def test_forgetting_drops_the_records_whatever_the_kind(kind: Kind, either: Fleet) -> None:
    await kind.start(either, FAILS)
    await ended(either)
    await either.forget("r-1")
    await either.forget("r-1")
    assert await either.observe() == []
    assert await kind.open().observe() == []
