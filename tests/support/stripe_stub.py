"""A Stripe on this machine that is true to its protocol and strict about what it gets, with a clock that tests move.

It checks the key, that every POST has an idempotency key, that one key is not used for two requests, that identifiers
are new within a day (and forgets them after), that timestamps are in its windows, and that customers and meters exist.
A fault is taken for each request while there are some: ``drop`` does what was asked and hangs up, ``hang`` does it and
answers too late, ``500`` does nothing, ``500-after`` does it and fails, ``429`` does nothing.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "sk_test_the_key_of_the_tests"
DAY_S = 86_400
Answer = tuple[int, dict[str, Any]]


@dataclass
class StripeStub:
    """What it has, and what it was asked."""

    now: Callable[[], float]
    url: str = ""
    meters: dict[str, str] = field(default_factory=lambda: {"modelyard_cost": "mtr_1"})
    customers: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    """All that were accepted: what is charged."""
    identifiers: dict[str, float] = field(default_factory=dict)
    idempotency: dict[str, tuple[float, str, Answer]] = field(default_factory=dict)
    faults: deque[str] = field(default_factory=deque)
    is_down: bool = False
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What no good client sends."""
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def charged(self, customer: str) -> int:
        return sum(int(one["value"]) for one in self.events if one["customer"] == customer)

    def customer_of(self, tenant_id: str) -> str:
        return next(id for id, one in self.customers.items() if one["metadata"]["modelyard_tenant"] == tenant_id)

    # --- what it does ----------------------------------------------------------------

    def do(self, method: str, path: str, given: dict[str, str], key: str, text: str) -> Answer:
        if method == "GET":
            return self._get(path, given)
        if not key:
            self.wrong.append(f"{path}: no idempotency key")
        known = self.idempotency.get(key)
        if known is not None and self.now() - known[0] < DAY_S:
            if known[1] != path + text:
                self.wrong.append(f"{path}: one idempotency key for two requests")
                return _error(400, "idempotency_error", "Keys for idempotent requests can only be used once")
            return known[2]
        answer = self._customer(given) if path == "/v1/customers" else self._event(given)
        self.idempotency[key] = (self.now(), path + text, answer)
        return answer

    def _get(self, path: str, given: dict[str, str]) -> Answer:
        if path == "/v1/billing/meters":
            meters = [{"id": id, "object": "billing.meter", "event_name": name} for name, id in self.meters.items()]
            return 200, {"object": "list", "data": meters, "has_more": False, "url": path}
        if path == "/v1/customers/search":
            wanted = given["query"].split("'")[3]
            found = [one for one in self.customers.values() if one["metadata"]["modelyard_tenant"] == wanted]
            return 200, {"object": "search_result", "data": found, "has_more": False, "url": path}
        meter_id = path.split("/")[4]
        since, until = int(given["start_time"]), int(given["end_time"])
        if since % 3600 or until % 3600:
            self.wrong.append(f"{path}: hours do not align")
        sums: dict[int, int] = {}
        for one in self.events:
            is_its = one["customer"] == given["customer"] and self.meters.get(one["event_name"]) == meter_id
            if is_its and since <= one["timestamp"] < until:
                hour = one["timestamp"] // 3600 * 3600
                sums[hour] = sums.get(hour, 0) + int(one["value"])
        data: list[dict[str, Any]] = [
            {
                "id": f"mtrusg_{hour}",
                "object": "billing.meter_event_summary",
                "aggregated_value": float(value),
                "start_time": hour,
                "end_time": hour + 3600,
                "meter": meter_id,
                "livemode": False,
            }
            for hour, value in sorted(sums.items(), reverse=True)
        ]
        start = next((at + 1 for at, one in enumerate(data) if one["id"] == given.get("starting_after")), 0)
        page = data[start : start + int(given.get("limit", "10"))]
        return 200, {"object": "list", "data": page, "has_more": start + len(page) < len(data), "url": path}

    def _customer(self, given: dict[str, str]) -> Answer:
        id = f"cus_{len(self.customers) + 1}"
        metadata = {"modelyard_tenant": given["metadata[modelyard_tenant]"]}
        self.customers[id] = {"id": id, "object": "customer", "name": given["name"], "metadata": metadata}
        return 200, self.customers[id]

    def _event(self, given: dict[str, str]) -> Answer:
        name, identifier, at = given["event_name"], given["identifier"], int(given["timestamp"])
        customer, value = given["payload[stripe_customer_id]"], given["payload[value]"]
        if name not in self.meters:
            return _error(400, "invalid_request_error", f"No active meter found for event name {name}")
        if customer not in self.customers or not value.isdigit() or len(identifier) > 100:
            self.wrong.append(f"event {given}")
            return _error(400, "invalid_request_error", "bad payload")
        if not self.now() - 35 * DAY_S <= at <= self.now() + 300:
            self.wrong.append(f"event of {at} at {self.now()}")
            return _error(400, "invalid_request_error", "The timestamp is outside of the window")
        if self.now() - self.identifiers.get(identifier, float("-inf")) < DAY_S:
            return _error(400, "invalid_request_error", f"An event already exists with identifier {identifier}.")
        self.identifiers[identifier] = self.now()
        self.events.append(
            {"event_name": name, "identifier": identifier, "timestamp": at, "customer": customer, "value": value}
        )
        return 200, {"object": "billing.meter_event", "identifier": identifier, "event_name": name, "livemode": False}


def _error(status: int, kind: str, message: str) -> Answer:
    return status, {"error": {"type": kind, "message": message}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StripeStub

    def do_GET(self) -> None:
        self._answer("")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("content-length", "0"))).decode())

    def _answer(self, text: str) -> None:
        stub, url = self.stub, urlsplit(self.path)
        given = {name: values[0] for name, values in parse_qs(text or url.query, keep_blank_values=True).items()}
        with stub.lock:
            stub.asked.append(f"{self.command} {url.path}")
            if stub.is_down:
                self.close_connection = True
                return
            fault = stub.faults.popleft() if stub.faults else ""
            key = self.headers.get("idempotency-key", "")
            answer: Answer
            if self.headers.get("authorization") != f"Bearer {KEY}":
                answer = _error(401, "invalid_request_error", f"Invalid API Key provided: {KEY[:9]}***")
            elif fault == "429":
                answer = _error(429, "rate_limit_error", "slow down")
            elif fault == "500":
                answer = _error(500, "api_error", "sorry")
                if key:  # failures are kept, too
                    stub.idempotency[key] = (stub.now(), url.path + text, answer)
            else:
                answer = stub.do(self.command, url.path, given, key, text)
                if fault == "500-after":
                    answer = _error(500, "api_error", "sorry, but it is done")
                    stub.idempotency[key] = (stub.now(), url.path + text, answer)
        if fault == "hang":
            stub.released.wait(10.0)
        if fault in ("drop", "hang"):
            self.close_connection = True
            return
        body = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("request-id", f"req_{len(stub.asked)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def stripe_stub(now: Callable[[], float]) -> Iterator[StripeStub]:
    """Yield one that listens on a free port."""
    stub = StripeStub(now)
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stub
    finally:
        stub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
