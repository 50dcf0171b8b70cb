"""TLS on the public port: answers, streams, refusals and restarts as without it."""

import json
import socket
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import processes
from tests.support.certificates import make_certificate
from tests.support.wire import Answer, request_bytes, split
from tests.support.yard import Yard


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    settings = {"gateway.tls_certificate": certificate, "gateway.tls_key": key, "gateway.header_read_timeout_s": 2}
    with Yard(folder / "yard", settings) as running:
        running.deploy("sim", options={"slots": 8, "ttft_ms": 1, "itl_ms": 1})
        yield running


def connect(yard: Yard, **options: Any) -> ssl.SSLSocket:
    trust = ssl.create_default_context(cafile=str(yard.settings["gateway.tls_certificate"]))
    for name, value in options.items():
        setattr(trust, name, value)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    plain = socket.create_connection(("127.0.0.1", yard.port), timeout=30)
    return trust.wrap_socket(plain, server_hostname="127.0.0.1")


def exchange(yard: Yard, request: bytes) -> list[Answer]:
    received = b""
    with connect(yard) as peer:
        peer.sendall(request)
        while data := peer.recv(65536):
            received += data
    return split(received)


def ask(yard: Yard, body: dict[str, Any], *headers: tuple[str, str]) -> Answer:
    sent = [("Authorization", f"Bearer {yard.admin_key}"), ("Connection", "close"), *headers]
    (answer,) = exchange(
        yard, request_bytes("POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=sent)
    )
    return answer


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": "[[sim: tokens=40]] hello"}], **fields}


def modelyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_an_answer_and_a_stream_come_whole(yard: Yard) -> None:
    assert yard.url.startswith("https://")
    answer = ask(yard, chat())
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 40
    stream = ask(yard, chat(stream=True))
    assert stream.is_complete
    assert bytes(stream.body).endswith(b"data: [DONE]\n\n")


def test_it_speaks_http_1_and_no_old_tls(yard: Yard) -> None:
    with connect(yard) as peer:
        assert peer.selected_alpn_protocol() == "http/1.1"
        assert peer.version() in ("TLSv1.2", "TLSv1.3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that is why
        with pytest.raises(ssl.SSLError):
            connect(yard, minimum_version=ssl.TLSVersion.TLSv1, maximum_version=ssl.TLSVersion.TLSv1_1)


def test_a_refusal_at_the_edge_arrives_and_the_connection_ends(yard: Yard) -> None:
    (answer,) = exchange(yard, b"nonsense\r\n\r\n")
    assert answer.status == 400
    started = time.monotonic()
    (answer,) = exchange(yard, request_bytes("GET", "/healthz")[:-2])
    assert answer.status == 408
    assert time.monotonic() - started < 15


def test_a_big_answer_waits_for_its_slow_reader(yard: Yard) -> None:
    body = chat(stream=True, max_tokens=12_000)
    body["messages"][0]["content"] = "[[sim: tokens=12000 slow=0]] hello"
    sent = [("Authorization", f"Bearer {yard.admin_key}"), ("Connection", "close")]
    request = request_bytes("POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=sent)
    received = b""
    with connect(yard) as peer:
        peer.sendall(request)
        time.sleep(1)  # the point of the test: nobody reads
        while data := peer.recv(16_384):
            received += data
    (stream,) = split(received)
    assert stream.is_complete
    assert bytes(stream.body).endswith(b"data: [DONE]\n\n")


def test_plain_http_is_closed_and_nothing_is_logged_as_an_error(yard: Yard) -> None:
    with socket.create_connection(("127.0.0.1", yard.port), timeout=30) as peer:
        peer.sendall(request_bytes("GET", "/healthz"))
        received = b""
        try:
            while data := peer.recv(65536):
                received += data
        except ConnectionResetError:
            pass
    assert not received.startswith(b"HTTP"), received
    assert yard.call("GET", "/healthz", key="").status == 200
    assert '"level":"error"' not in (yard.data / "logs" / "gateway-0.log").read_text()


def test_the_command_line_trusts_its_own_platform(yard: Yard) -> None:
    done = modelyard("models", "--data-dir", str(yard.data))
    assert done.returncode == 0, done.stderr
    assert "sim" in done.stdout


def test_a_new_certificate_is_used_after_a_restart(yard: Yard, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "renewed")
    Path(str(yard.settings["gateway.tls_certificate"])).write_bytes(certificate.read_bytes())
    Path(str(yard.settings["gateway.tls_key"])).write_bytes(key.read_bytes())
    done = modelyard("restart", "--data-dir", str(yard.data))
    assert done.returncode == 0, done.stderr
    with connect(yard) as peer:
        assert dict(name[0] for name in peer.getpeercert()["subject"])["commonName"] == "renewed"  # type: ignore[index]


def test_a_pair_that_does_not_match_is_one_line_of_up(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    _, key = make_certificate(tmp_path, "other")
    config = tmp_path / "modelyard.toml"
    config.write_text(f'[gateway]\ntls_certificate = "{certificate}"\ntls_key = "{key}"\n')
    done = modelyard("up", "--port", "0", "--data-dir", str(tmp_path / "data"), "--config", str(config))
    assert done.returncode != 0
    assert "key values mismatch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not processes.touching(tmp_path / "data")
