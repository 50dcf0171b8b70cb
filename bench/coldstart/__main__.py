"""Cold starts of SmolLM2 beside one another: ``python -m bench.coldstart [--rounds 3] [--mb-per-s 100]``.

One platform with its real processes; the model comes from a web server on loopback that sends no faster than asked, as
an object store over a network does. Each round puts the endpoint to sleep and asks it for one token: with nothing on
the node (fetched, verified, loaded), with the weights in the node's cache (loaded), and with a replica in a warm pool
(taken). The times are what the caller waits until the answer, on the machine as it is.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.origin import origin
from tests.support.waiting import eventually
from tests.support.yard import Yard
from tools.smollm import model_file

SETTINGS = {"fetch.private_networks": "127.0.0.1/32", "gateway.load_wait_s": 300, "gateway.total_timeout_s": 300}


def main() -> None:
    """Run all rounds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.coldstart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="Speed of the store, each connection.")
    parser.add_argument("--json", action="store_true", dest="is_json")
    given = parser.parse_args()
    content = model_file().read_bytes()
    times: dict[str, list[float]] = {name: [] for name in ("nothing there", "weights on the node", "warm pool")}
    with origin() as place, tempfile.TemporaryDirectory() as folder, Yard(Path(folder), SETTINGS) as yard:
        for number in range(given.rounds):
            # Other bytes than in the rounds before: the cache goes by content.
            place.put(f"/smol-{number}.gguf", with_mark(content, number), bytes_per_s=given.mb_per_s * 1e6)
            measure(yard, place.url, number, times)
    rows = {name: (statistics.median(values), min(values), max(values)) for name, values in times.items()}
    if given.is_json:
        print(json.dumps(rows))
        return
    first = rows["nothing there"][0]
    print(f"SmolLM2-135M Q4_1, {len(content) / 1e6:.0f} MB from a store of {given.mb_per_s:g} MB/s a connection")
    print(f"{'':22}{'median':>9}{'min':>9}{'max':>9}{'of the first':>14}")
    for name, (median, least, most) in rows.items():
        print(f"{name:22}{median:>7.2f} s{least:>7.2f} s{most:>7.2f} s{median / first:>13.0%}")


def measure(yard: Yard, url: str, number: int, times: dict[str, list[float]]) -> None:
    """Do one round with an endpoint of its own, whose weights nobody has yet."""
    name = f"smol-{number}"
    order = {
        "model_name": name,
        "framework": "llamacpp",
        "model_artifact": f"{url}/{name}.gguf",
        "options": {"slots": 1, "context_length": 256},
        "hardware": {"min_replicas": 0, "max_replicas": 1},
        "scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 1},
    }
    times["nothing there"].append(waited(yard, name, order))
    asleep(yard, name)
    times["weights on the node"].append(waited(yard, name))
    asleep(yard, name)
    assert yard.call("PUT", "/v1/pools/bench", {"model": name, "replicas": 1}).status == 200
    eventually(lambda: yard.get("/v1/pools")["data"][0]["ready"] == 1, 120, "the pool is warm")
    times["warm pool"].append(waited(yard, name))
    assert yard.call("DELETE", "/v1/pools/bench").status == 202
    assert yard.call("DELETE", f"/v1/endpoints/{name}").status == 202
    eventually(lambda: not yard.engines(), 60, "nothing runs")


def waited(yard: Yard, name: str, order: dict[str, object] | None = None) -> float:
    """Return the seconds until an answer, from the deployment or from the request to a sleeping endpoint."""
    body = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    began_s = time.monotonic()
    if order is not None:
        reply = yard.call("POST", "/v1/models/deploy", order)
        assert reply.status == 202, reply.body
    reply = yard.call("POST", "/v1/chat/completions", body, within_s=300)
    assert reply.status == 200, reply.body
    return time.monotonic() - began_s


def asleep(yard: Yard, name: str) -> None:
    eventually(lambda: yard.get(f"/v1/endpoints/{name}")["replicas"] == [], 60, f"{name} sleeps")


def with_mark(content: bytes, number: int) -> bytes:
    """Return the model with another last weight byte: the same size and the same work, another digest."""
    return content[:-1] + bytes([(content[-1] + 1 + number) % 256])


if __name__ == "__main__":
    main()
