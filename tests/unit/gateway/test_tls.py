"""The certificate and its key: used, or refused in one line that says which file is wrong."""

import ssl
import subprocess
from pathlib import Path

import pytest
from tests.support.certificates import make_certificate

from modelyard.config import GatewayConfig
from modelyard.errors import StartupError
from modelyard.gateway.tls import tls_context, trusting


def context(certificate: Path | str, key: Path | str) -> ssl.SSLContext | None:
    return tls_context(GatewayConfig(tls_certificate=str(certificate), tls_key=str(key)))


def test_without_files_there_is_no_tls() -> None:
    assert context("", "") is None


def test_a_good_pair_makes_a_strict_context(tmp_path: Path) -> None:
    made = context(*make_certificate(tmp_path))
    assert made is not None
    assert made.minimum_version == ssl.TLSVersion.TLSv1_2
    assert made.options & ssl.OP_NO_RENEGOTIATION


def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for files, said in {
        (certificate, ""): "both",
        ("", key): "both",
        (tmp_path / "none.pem", key): "none.pem: No such file",
        (certificate, tmp_path): "Is a directory",
        (certificate, other): "key values mismatch",
        (broken, key): "broken.pem",
        (certificate, broken): "broken.pem",
        (certificate, locked): "pass phrase",
    }.items():
        with pytest.raises(StartupError) as caught:
            context(*files)
        message = str(caught.value)
        assert said in message, message
        assert "\n" not in message
        assert "tls_key" in message


def test_a_client_trusts_the_very_certificate_only(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    trust = trusting(str(certificate))
    assert trust.verify_mode == ssl.CERT_REQUIRED
    assert not trust.check_hostname
