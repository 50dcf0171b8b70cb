"""What judges others' suites must itself be able to say no: the table, the reader of reports, the proxy."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.conformance.outside.proxy import key_proxy
from tests.conformance.outside.suites import Refusal, Run, results_of

TABLE = [Refusal("a.py::test_x_*", "no such route", "not offered")]


@pytest.mark.parametrize(
    ("results", "surprises"),
    [
        ({"a.py::test_x_1": "404 no such route", "a.py::test_y": ""}, []),
        ({"a.py::test_x_1": ""}, ["a.py::test_x_1 passes now, take it out of the table: a.py::test_x_*"]),
        ({"a.py::test_x_1": "500"}, ["a.py::test_x_1 failed: 500"]),
        ({"a.py::test_x_1": "no such route", "a.py::test_y": "500"}, ["a.py::test_y failed: 500"]),
        ({"a.py::test_y": ""}, ["the table has a.py::test_x_*, and the suite has not"]),
    ],
)
def test_what_the_table_does_not_say_is_a_surprise(results: dict[str, str], surprises: list[str]) -> None:
    assert Run(results).surprises(TABLE) == surprises


def test_brackets_in_a_pattern_are_brackets_and_path_parameters_are_left_out() -> None:
    strict = Refusal("a.py::test_x[strict]", "", "")
    assert [strict.covers(f"a.py::test_x[{name}]") for name in ("strict", "loose", "s")] == [True, False, False]
    assert not Refusal("a.py::*", "", "").covers("a.py::test_path_params_list[loose]")


def test_reports_are_read_with_failures_and_without_what_was_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.api_resources.chat.test_a.TestA" name="t1[loose]"/>'
        '<testcase classname="tests.api_resources.test_b.TestB" name="t2"><failure message="m">t</failure></testcase>'
        '<testcase classname="tests.api_resources.test_b.TestB" name="t3"><error/></testcase>'
        '<testcase classname="tests.api_resources.test_b.TestB" name="t4"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert results_of(report) == {
        "chat/test_a.py::t1[loose]": "",
        "test_b.py::t2": "m\nt",
        "test_b.py::t3": "None\nNone",
    }


class Mirror(BaseHTTPRequestHandler):
    """Tells what arrived: the key headers, another header, the body."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        names = ("authorization", "x-api-key", "x-other", "transfer-encoding")
        told = [f"{name}={self.headers.get(name)}" for name in names]
        length = int(self.headers.get("content-length", "0"))
        body = self.rfile.read(length) if length else self.read_chunked()
        answer = "\n".join([*told, ""]).encode() + body
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def read_chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_proxy_changes_keys_and_nothing_else_on_one_connection(mirror: str) -> None:
    with key_proxy(mirror, "my_key") as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        body = b"Authorization: Bearer My API Key\r\n\r\n" + bytes(range(256)) * 1000

        def told(headers: dict[str, str], *, is_chunked: bool = False) -> bytes:
            content = iter([body[:1000], body[1000:]]) if is_chunked else body
            connection.request("POST", "/", content, headers, encode_chunked=is_chunked)
            return connection.getresponse().read()

        sent = {"AUTHORIZATION": "Bearer My API Key", "x-other": "My API Key"}
        head = b"authorization=Bearer my_key\nx-api-key=None\nx-other=My API Key\ntransfer-encoding=%b\n"
        assert told(sent) == head % b"None" + body
        assert told({**sent, "Transfer-Encoding": "chunked"}, is_chunked=True) == head % b"chunked" + body
        assert told({"X-API-Key": "k"}).startswith(b"authorization=None\nx-api-key=my_key\nx-other=None")
        assert told({}).startswith(b"authorization=None\nx-api-key=None\n")
        connection.close()
