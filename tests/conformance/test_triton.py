"""A real Triton server, driven by the command that our engine renders, behind our guard and below our gateway."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support import triton
from tests.support.waiting import eventually, eventually_async
from tests.support.yard import Yard
from yarl import URL

from modelyard.clock import SystemClock
from modelyard.engines import LaunchSpec, Options
from modelyard.engines.pages import read_samples
from modelyard.engines.triton import TritonEngine
from modelyard.fleet import StartOrder
from modelyard.fleet.local import LocalFleet, stop_all
from modelyard.fleet.ports import free_port

pytestmark = pytest.mark.skipif(bool(triton.why_not()), reason=triton.why_not())

MODEL = "acme/tiny"
SECRET = "the-replica-secret"
INFER = "/v2/models/acme%2Ftiny/infer"
START_S = 60
CLIENT = Path(__file__).with_name("triton_client.py")


@dataclass(slots=True)
class Running:
    engine: TritonEngine
    url: str
    statuses: list[int]


@dataclass(slots=True)
class Replica:
    running: Running
    session: aiohttp.ClientSession

    async def call(self, path: str, body: object = None, secret: str = SECRET) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        method = "GET" if body is None else "POST"
        url = URL(self.running.url + path, encoded=True)
        async with self.session.request(method, url, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def samples(self) -> dict[str, float]:
        status, page = await self.call(self.running.engine.load_path)
        assert status == 200
        return read_samples(page)


@pytest.fixture(params=["file", "folder"], scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("triton")
    artifact = root / "model.onnx"
    artifact.write_bytes(triton.doubling_onnx())
    options: Options = {"batch_max": 8, "batch_delay_us": 200_000}
    if request.param == "folder":
        artifact = folder_in(root, triton.config_text(dynamic_batching="{ max_queue_delay_microseconds: 200000 }"))
        options = {}
    engine = TritonEngine(triton.command_in(root))
    engine.check_artifact(artifact)
    fleet = LocalFleet(root / "replicas", SystemClock())
    try:
        yield asyncio.run(started(fleet, engine, options, artifact))
        asyncio.run(fleet.stop("r-1", grace_s=20))
        assert asyncio.run(fleet.observe())[0].exit_reason == "stopped"
    finally:
        stop_all(root / "replicas", 0.0)


@pytest.fixture
async def replica(running: Running) -> AsyncIterator[Replica]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Replica(running, session)


def folder_in(root: Path, config: str) -> Path:
    folder = root / "anything"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(triton.doubling_onnx())
    (folder / "config.pbtxt").write_text(config)
    return folder


async def started(fleet: LocalFleet, engine: TritonEngine, options: Options, artifact: Path) -> Running:
    address = await fleet.reserve("r-1")
    settings = engine.settings(options, artifact_bytes=100)
    spec = LaunchSpec(
        replica_id="r-1", model_name=MODEL, artifact=artifact, host=address.host, port=address.port, secret=SECRET,
        slots=settings.slots, context_length=0, threads=1, options=options, work_dir=Path(address.work_dir),
    )  # fmt: skip
    await fleet.start(StartOrder("r-1", "ep-1", address.host, address.port, SECRET, engine.command(spec)))
    url = f"http://{address.host}:{address.port}"
    statuses: list[int] = []

    async with aiohttp.ClientSession() as session:

        async def look() -> bool:
            assert (await fleet.observe())[0].is_running, [line async for line in fleet.log_lines("r-1", follow=False)]
            async with session.get(url + engine.ready_path) as response:
                statuses.append(response.status)
            return response.status == 200

        await eventually_async(look, START_S, "Triton is ready")
    return Running(engine, url, statuses)


def tensors(*rows: list[float]) -> dict[str, Any]:
    data = [number for row in rows for number in row]
    return {"inputs": [{"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": data}]}


async def test_it_is_not_ready_before_the_model_is_loaded_and_answers_under_the_name_of_the_replica(
    replica: Replica,
) -> None:
    assert set(replica.running.statuses) == {503, 200}
    status, answer = await replica.call(INFER, tensors([1, 2, 3, 4]))
    assert status == 200, answer
    assert answer["model_name"] == "acme__tiny"
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [2, 4, 6, 8]}]
    status, metadata = await replica.call("/v2/models/acme%2Ftiny")
    assert status == 200
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]


async def test_requests_that_come_together_share_a_batch(replica: Replica) -> None:
    before = await replica.samples()
    rows = [[float(place)] * 4 for place in range(24)]
    answers = await asyncio.gather(*(replica.call(INFER, tensors(row)) for row in rows))
    assert [answer["outputs"][0]["data"] for _, answer in answers] == [[2 * number for number in row] for row in rows]
    after = await replica.samples()
    inferences = after["nv_inference_count"] - before["nv_inference_count"]
    executions = after["nv_inference_exec_count"] - before["nv_inference_exec_count"]
    assert inferences == 24
    assert executions <= 12, "fewer than two requests a batch"


async def test_its_own_page_tells_what_waits(replica: Replica) -> None:
    _, page = await replica.call(replica.running.engine.load_path)
    load = replica.running.engine.read_load(page)
    assert load.waiting == 0
    assert load.running is None, "Triton does not tell"


@pytest.mark.parametrize("secret", ["", "wrong", SECRET + "x"])
async def test_nothing_but_readiness_is_served_without_the_secret(replica: Replica, secret: str) -> None:
    before = (await replica.samples())["nv_inference_count"]
    for path, body in ((INFER, tensors([1, 2, 3, 4])), ("/metrics", None), ("/v2/models/acme%2Ftiny", None)):
        status, answer = await replica.call(path, body, secret=secret)
        assert status == 401, path
        assert "error" in answer
    assert (await replica.samples())["nv_inference_count"] == before


async def test_what_could_load_or_read_something_is_let_through_to_nobody(replica: Replica) -> None:
    for path, body in (
        ("/v2/repository/models/acme__tiny/load", {}),
        ("/v2/repository/index", {}),
        ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 1}),
        ("/v2/trace/setting", {}),
        ("/v2/logging", None),
        ("/v2/models/acme__tiny/infer", tensors([1, 2, 3, 4])),
    ):
        status, _ = await replica.call(path, body)
        assert status == 404, path


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "z", "shape": [1, 4], "datatype": "FP32", "data": [1] * 4},
        {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1] * 3},
        {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1] * 3},
        {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ["a", 1, 1, 1]},
        {"name": "x", "shape": [1, 4], "datatype": "INT64", "data": [1] * 4},
        {"name": "x", "shape": [64, 4], "datatype": "FP32", "data": [1] * 256},
    ],
    ids=["name", "dims", "count", "text", "datatype", "batch"],
)
async def test_a_bad_request_is_the_callers_fault_and_never_the_replicas(
    replica: Replica, tensor: dict[str, Any]
) -> None:
    """Triton itself answers 500 to some of these, which would speak against the replica at the gateway."""
    status, answer = await replica.call(INFER, {"inputs": [tensor]})
    assert status == 400, answer
    assert answer["error"]
    assert (await replica.call(INFER, tensors([1, 2, 3, 4])))[0] == 200


def test_a_model_that_triton_cannot_load_ends_the_replica_with_the_reason(tmp_path: Path) -> None:
    engine = TritonEngine(triton.command_in(tmp_path))
    folder = folder_in(tmp_path, triton.config_text(output='[ { name: "y" data_type: TYPE_NONE_SUCH dims: [ 4 ] } ]'))
    engine.check_artifact(folder)
    spec = LaunchSpec("r-1", MODEL, folder, "127.0.0.1", free_port(()), SECRET, 8, 0, 1, {}, tmp_path)
    command = engine.command(spec)
    done = subprocess.run(
        command.argv, env={**os.environ, **command.env}, cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert b"TYPE_NONE_SUCH" in done.stdout + done.stderr


# --- through the platform -----------------------------------------------------------------


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    root = tmp_path_factory.mktemp("triton-yard")
    words = list(triton.command_in(root))
    with Yard(root / "yard", {"engines.triton": ",".join(words), "control.replica_grace_s": 10}) as yard:
        artifact = root / "doubling.onnx"
        artifact.write_bytes(triton.doubling_onnx())
        order = {"model_name": "doubling", "framework": "triton", "model_artifact": f"file://{artifact}"}
        reply = yard.call("POST", "/v1/models/deploy", {**order, "hardware": {"min_replicas": 1, "max_replicas": 1}})
        assert reply.status == 202, reply.body
        yard.wait_ready("doubling", within_s=START_S)
        yield yard


def test_a_request_goes_through_the_platform_and_is_metered(yard: Yard) -> None:
    key = yard.new_key()
    reply = yard.call("POST", "/v2/models/doubling/infer", tensors([1, 2, 3, 4]), key=key)
    assert reply.status == 200, reply.body
    assert reply.json()["model_name"] == "doubling"
    assert reply.json()["outputs"][0]["data"] == [2, 4, 6, 8]
    row = yard.row_of(reply.headers["x-request-id"])
    assert (row["status"], row["http_status"]) == ("success", 200)
    eventually(yard.is_booked, 20, "every intent is settled")


def test_an_outside_client_of_the_protocol_works_with_the_gateway(yard: Yard) -> None:
    """``tritonclient`` is NVIDIA's own; it runs in Triton's environment."""
    command = [str(triton.PYTHON), str(CLIENT), f"127.0.0.1:{yard.port}", yard.new_key(), "doubling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told == {
        "live": True,
        "ready": True,
        "model_ready": True,
        "unknown_model_ready": False,
        "outputs": [[2.0, 4.0, 6.0, 8.0], [20.0, 40.0, 60.0, 80.0]],
        "concurrent": [[2.0 * place] * 4 for place in range(16)],
    }


def test_of_a_foreign_model_nothing_is_told(yard: Yard) -> None:
    stranger = yard.new_tenant("stranger")
    for path in ("/v2/models/doubling/ready", "/v2/models/no-such-model/ready"):
        assert yard.call("GET", path, key=stranger).status == 404
    assert yard.call("GET", "/v2/models/doubling/ready", key="").status == 401
    assert yard.call("GET", "/v2/health/ready", key="").status == 200
    assert yard.call("GET", "/v2/health/live", key="").status == 200
