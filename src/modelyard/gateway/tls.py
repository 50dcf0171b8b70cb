"""TLS on the public port, if ``gateway.tls_certificate`` and ``gateway.tls_key`` are set.

Python's own server defaults (no old protocols, no weak ciphers), TLS 1.2 at
least, HTTP/1.1 only. A new certificate is read by the next worker: ``modelyard
restart`` puts it to use without dropping a connection.
"""

import ssl

from modelyard.config import GatewayConfig
from modelyard.errors import StartupError

_SETTINGS = "gateway.tls_certificate and gateway.tls_key"


def tls_context(settings: GatewayConfig) -> ssl.SSLContext | None:
    """Return what to serve with, None without TLS.

    Raises:
        StartupError: one of the two files is missing, unreadable, no PEM, or they do not belong together.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise StartupError(f"TLS needs both {_SETTINGS}; one of them is not set.")
    for file in (certificate, key):
        try:
            with open(file, "rb"):  # noqa: PTH123 - only to name the file that cannot be read; ssl does not
                pass
        except OSError as error:
            raise StartupError(f"Cannot read {file}: {error.strerror}. Check {_SETTINGS}.") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A key with a pass phrase would else ask a terminal that is not there.
        context.load_cert_chain(certificate, key, password=_no_pass_phrase)
    except ssl.SSLError as error:
        reason = (error.reason or "").lower().replace("_", " ") or "not PEM"
        raise StartupError(f"Cannot use {certificate} with {key}: {reason}. Check {_SETTINGS}.") from error
    return context


def trusting(certificate: str) -> ssl.SSLContext:
    """Return what a client on this machine connects with: it trusts this certificate file, whatever name is in it.

    Raises:
        OSError: the file cannot be read, or is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def _no_pass_phrase() -> str:
    raise StartupError(
        "The file of gateway.tls_key has a pass phrase. Store the key without one, readable by you only."
    )
