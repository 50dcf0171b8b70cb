"""Self-signed certificates for 127.0.0.1, made by the ``openssl`` program."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Return the files of a new certificate and its key; the test is skipped where there is no ``openssl``."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
