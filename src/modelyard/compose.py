"""Configuration in, running planes out: the only file that names backends.

Each function imports what its own plane needs and no more: the gateway must
start fast and stay small, so nothing of SQL or of the web framework is ever
loaded there. The supervisor (``cli/supervise.py``) uses the secrets and
``stop_engines`` only.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelyard.clock import Clock, SystemClock
from modelyard.config import Config, DataDirectory, FetchConfig, FleetConfig
from modelyard.errors import StartupError

if TYPE_CHECKING:
    from modelyard.control.books import Books
    from modelyard.control.leadership import Leadership
    from modelyard.engines import Engine, Engines
    from modelyard.fleet import Fence, Fleet
    from modelyard.metering.events import UsageEvents
    from modelyard.metering.stripe_reports import StripeReports
    from modelyard.stores import BillingStore, BookStore, ControlStore, UsageStore
    from modelyard.stores.sql import Database
    from modelyard.web.fetcher import Fetcher

BACKLOG = 2048
UNSENT_BYTES = 32 * 1024
"""What the kernel keeps of an answer beyond what is on its way."""
READ_S = 60.0
"""Longest question of a command to a database that it only reads."""
BATCH_LOOK_S = 0.1
BATCH_ANSWER_S = 3600.0
"""Longest answer to a line; gateways have bounds of their own, so this is for one that is frozen."""
PLANE_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "134217728"}
"""What glibc is told at a plane's start: keep freed memory instead of giving it back and asking for it again at each
large request (a tenth of the CPU of a 284 KB body)."""


class Secrets(NamedTuple):
    """What the planes of one data directory share."""

    pepper: bytes
    internal_token: str


def load_secrets(data: DataDirectory) -> Secrets:
    """Return the secrets of ``data``; makes them on the first start.

    Raises:
        StartupError: a secret cannot be read or written.
    """
    return Secrets(bytes.fromhex(_secret(data.pepper)), _secret(data.internal_token))


def _secret(file: Path) -> str:
    """Return the secret in ``file``, made if missing. Linking a complete draft lets two planes race and agree."""
    try:
        if not file.exists():
            draft = file.with_name(f".{file.name}.{os.getpid()}")
            draft.unlink(missing_ok=True)  # of a process that was killed here and had our pid
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as writer:
                writer.write(secrets.token_hex(32))
                writer.flush()
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
            draft.unlink()
        text = file.read_text("ascii").strip()
    except OSError as error:
        raise StartupError(f"Cannot use the secret {file}: {error.strerror}. Check its owner and mode.") from error
    except UnicodeDecodeError:
        text = ""
    if len(text) != 64 or not all(digit in "0123456789abcdef" for digit in text):
        raise StartupError(f"The secret {file} is damaged. Restore it from a backup; a new one voids all API keys.")
    return text


def open_listener(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Return a listening socket; ``is_shared`` lets other workers listen on the same port.

    Raises:
        OSError: the address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Connections inherit it. Without it the kernel takes megabytes for a client that reads slowly, and the
            # engine is held back only after those.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener


def run_gateway_plane(
    config: Config,
    data: DataDirectory,
    *,
    worker: int,
    listener: socket.socket,
    level: str,
    name: str = "",
    ready_fd: int | None = None,
) -> None:
    """Run one gateway worker until SIGTERM or SIGINT, then drain it; SIGUSR1 says that another one relieves it.

    ``name`` is its own among the workers of this number that live at the same time. With ``ready_fd`` it relieves
    another one, and writes a byte there once it serves.
    """
    from modelyard.gateway.app import Rates, Shift, run_gateway
    from modelyard.gateway.cors import check_origins
    from modelyard.gateway.tls import tls_context
    from modelyard.metering.prices import micro_of
    from modelyard.observe.logs import setup_logging
    from modelyard.stores.feed import FeedClient

    name = name or f"gateway-{worker}"
    setup_logging(name, data.logs / f"{name}.log", level)
    shared = load_secrets(data)
    check_origins(config.gateway.cors_origins)
    tls = tls_context(config.gateway)

    async def serve(stop: asyncio.Event) -> None:
        relieved = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, relieved.set)
        on_ready = None if ready_fd is None else partial(_say_ready, ready_fd)
        await run_gateway(
            settings=config.gateway,
            name=name,
            worker=worker,
            shift=Shift(listener, tls, stop, relieved, on_ready),
            follower=FeedClient(data.feed_socket, shared.internal_token, name),
            control_socket=data.control_socket,
            internal_token=shared.internal_token,
            pepper=shared.pepper,
            journal_root=data.journal,
            last_table=data.last_table,
            caller_socket=data.caller_socket(name),
            rates=Rates(config.billing.currency, micro_of(config.batch.price_factor)),
            clock=SystemClock(),
            fetcher=_fetcher(config.fetch) if config.gateway.image_links else None,
        )

    _run(serve)


def _say_ready(descriptor: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more; the signal to stop is on its way
        os.write(descriptor, b"1")
    os.close(descriptor)


def run_control_plane(config: Config, data: DataDirectory, *, level: str) -> None:
    """Run the controller until SIGTERM or SIGINT; engines go on running."""
    from modelyard.console.app import build_console
    from modelyard.control.app import Given, run_control
    from modelyard.fleet import Fence
    from modelyard.metering.delivery import Delivery
    from modelyard.observe.logs import setup_logging
    from modelyard.stores.contents import DiskContents
    from modelyard.stores.feed import FeedServer
    from modelyard.stores.mirror import MirroredStore
    from modelyard.stores.sql import (
        SqlBatchStore,
        SqlBillingStore,
        SqlControlStore,
        SqlEventStore,
        SqlFileStore,
        SqlRequestStore,
        SqlUploadStore,
        SqlUsageStore,
        SqlWebhookStore,
    )

    setup_logging("control", data.logs / "control.log", level)
    shared = load_secrets(data)
    clock = SystemClock()

    fence = Fence()
    fetcher = _fetcher(config.fetch)
    fleet = _fleet(config.fleet, data, clock, fence)

    # Opening blocks and may migrate, so it comes before the loop; what it refuses becomes one line of ``up``.
    database = _database(config, data, clock)

    books = _books(config, data, database, clock)

    async def serve(stop: asyncio.Event) -> None:
        usage = SqlUsageStore(database)
        given = Given(
            config=config,
            data=data,
            store=MirroredStore(SqlControlStore(database), clock),
            usage=usage,
            books=books,
            requests=SqlRequestStore(database),
            events=SqlEventStore(database),
            webhooks=SqlWebhookStore(database),
            uploads=SqlUploadStore(database),
            batches=SqlBatchStore(database),
            files=SqlFileStore(database),
            contents=DiskContents(data.files),
            billing=SqlBillingStore(database),
            fetcher=fetcher,
            fleet=fleet,
            leadership=_leadership(config, database, fence, clock),
            engines=_engines(config, data),
            feed=FeedServer(data.feed_socket, shared.internal_token),
            delivery=Delivery(data.journal, usage, config.control.delivery_interval_s, books.needed),
            console=build_console,
            internal_token=shared.internal_token,
            pepper=shared.pepper,
            clock=clock,
        )
        await run_control(given, stop)

    _run(serve)


def _database(config: Config, data: DataDirectory, clock: Clock) -> "Database":
    from modelyard.stores.sql import open_database

    url = config.control.database_url or f"sqlite:///{data.database}"
    return open_database(url, timeout_s=config.control.database_timeout_s, clock=clock)


def _leadership(config: Config, database: "Database", fence: "Fence", clock: Clock) -> "Leadership":
    from modelyard.control.leadership import Candidate, Leadership
    from modelyard.fleet import processes
    from modelyard.stores.sql import SqlLeaderStore

    return Leadership(
        store=SqlLeaderStore(database),
        candidate=Candidate(processes.identity(), processes.is_gone),
        fence=fence,
        clock=clock,
        lease_s=config.control.lease_s,
    )


def run_batch_plane(config: Config, data: DataDirectory, *, name: str, level: str) -> None:
    """Work on batches until SIGTERM or SIGINT. ``name`` is its own among those that live at the same time."""
    from modelyard.observe.logs import setup_logging

    setup_logging(name, data.logs / f"{name}.log", level)
    if not config.control.database_url:
        # Most installations have no batches: until the first one, this process is nothing but a file that it looks at.
        while not data.batches_wanted.exists():
            time.sleep(BATCH_LOOK_S)

    from modelyard.batch.flow import BatchPlane
    from modelyard.batch.gateways import Gateways
    from modelyard.batch.sight import Sight
    from modelyard.metering.prices import configured, micro_of
    from modelyard.stores.contents import DiskContents
    from modelyard.stores.sql import (
        SqlBatchStore,
        SqlBillingStore,
        SqlControlStore,
        SqlFileStore,
        SqlUsageStore,
    )

    shared = load_secrets(data)
    clock = SystemClock()
    database = _database(config, data, clock)
    store = SqlBatchStore(database)
    sight = Sight(
        store=store,
        control=SqlControlStore(database),
        usage=SqlUsageStore(database),
        billing=SqlBillingStore(database),
        configured=configured(config.prices),
        factor_micro=micro_of(config.batch.price_factor),
        concurrency=config.batch.concurrency,
        clock=clock,
    )

    async def serve(stop: asyncio.Event) -> None:
        try:
            async with Gateways(
                data.control_socket.parent, shared.internal_token, timeout_s=BATCH_ANSWER_S
            ) as gateways:
                plane = BatchPlane(
                    holder=f"{name}.{secrets.token_hex(4)}",
                    store=store,
                    files=SqlFileStore(database),
                    contents=DiskContents(data.files),
                    gateways=gateways,
                    sight=sight,
                    settings=config.batch,
                    folder=data.batches,
                    wanted=data.batches_wanted,
                    file_bytes_max=config.control.batch_file_bytes_max,
                    body_bytes_max=config.gateway.body_bytes_max,
                    clock=clock,
                )
                await plane.run(stop)
        finally:
            await database.close()

    _run(serve)


class Readable(NamedTuple):
    """What is stored, for whoever only reads."""

    control: "ControlStore"
    usage: "UsageStore"
    books: "BookStore"
    billing: "BillingStore"
    engines: "Engines"


@contextlib.asynccontextmanager
async def reading(config: Config, data: DataDirectory) -> AsyncIterator[Readable]:
    """Open the stores to read, beside a platform that runs or not; nothing is created or changed.

    Raises:
        StartupError: there is no database, or it is of another release.
    """
    from modelyard.stores.sql import SqlBillingStore, SqlBookStore, SqlControlStore, SqlUsageStore, open_to_read

    url = config.control.database_url or f"sqlite:///{data.database}"
    # Whole hours of rows are sorted at a time, which may take longer than anything that a request waits for.
    database = open_to_read(url, timeout_s=max(config.control.database_timeout_s, READ_S), clock=SystemClock())
    control, usage = SqlControlStore(database), SqlUsageStore(database)
    try:
        yield Readable(control, usage, SqlBookStore(database), SqlBillingStore(database), _engines(config, data))
    finally:
        await database.close()


def _books(config: Config, data: DataDirectory, database: "Database", clock: Clock) -> "Books":
    """Return the books with the sinks that are configured."""
    from modelyard.control.books import Books
    from modelyard.stores.sql import SqlBookStore

    books = SqlBookStore(database)
    events = _usage_events(config, data, database, clock) if config.kafka.brokers else None
    stripe = _stripe_reports(config, data, database, clock) if config.stripe.enabled else None
    return Books(books, events=events, stripe=stripe)


def _usage_events(config: Config, data: DataDirectory, database: "Database", clock: Clock) -> "UsageEvents":
    from modelyard.metering.events import UsageEvents
    from modelyard.stores.kafka import KafkaSink, check
    from modelyard.stores.sql import SqlBookStore, SqlUsageStore

    check(config.kafka)
    return UsageEvents(
        root=data.journal,
        books=SqlBookStore(database),
        usage=SqlUsageStore(database),
        open_sink=partial(KafkaSink, config.kafka),
        clock=clock,
        interval_s=config.kafka.interval_s,
        spool_bytes_max=config.kafka.spool_bytes_max,
    )


def _stripe_reports(config: Config, data: DataDirectory, database: "Database", clock: Clock) -> "StripeReports":
    from modelyard.domain.billing import BillingPlan
    from modelyard.metering.stripe_reports import StripeReports
    from modelyard.stores.sql import SqlBillingStore, SqlBookStore, SqlControlStore
    from modelyard.stores.stripe import StripeMeters, load_sdk

    load_sdk()
    file = data.provider_keys.with_name("stripe")
    try:
        key = (os.environ.get("STRIPE_API_KEY") or file.read_text("ascii")).strip()
    except (OSError, UnicodeDecodeError):
        key = ""
    if not key:
        raise StartupError(f"'stripe.enabled' is set, but there is no key: set STRIPE_API_KEY, or write it to {file}.")
    settings = config.stripe
    if len(set(settings.customers.values())) < len(settings.customers):
        # Stripe's summaries are by customer: nobody could say which of the two an event of that hour was.
        raise StartupError("Bad setting stripe.customers: two tenants have the same customer. Give each its own.")
    billing = SqlBillingStore(database)

    async def spared() -> set[str]:
        return {one.tenant_id for one in await billing.accounts() if one.plan is not BillingPlan.PAY_AS_YOU_GO}

    return StripeReports(
        books=SqlBookStore(database),
        meters=StripeMeters(key, api_base=settings.api_base, customers=settings.customers),
        settings=settings,
        clock=clock,
        tenants=SqlControlStore(database).tenants,
        spared=spared,
    )


def _fetcher(settings: FetchConfig) -> "Fetcher":
    from modelyard.policy.addresses import networks
    from modelyard.web.fetcher import Fetcher, trust

    try:
        private = networks(settings.private_networks)
    except ValueError as error:
        raise StartupError(f"Bad setting fetch.private_networks: {error}. Example: 10.1.0.0/16") from error
    try:
        return Fetcher(private, tls=trust(settings.ca_file))
    except ValueError as error:
        raise StartupError(f"Bad setting fetch.ca_file: {error}. Give a PEM file with certificates.") from error


def _fleet(settings: FleetConfig, data: DataDirectory, clock: Clock, fence: "Fence") -> "Fleet":
    from modelyard.fleet import declared
    from modelyard.fleet.machine import Machine, weights_in

    nodes_file = data.root / settings.nodes_file if settings.nodes_file else None
    machine = Machine(
        declared.load(settings.nodes, nodes_file),
        cached=partial(weights_in, data.artifacts),
        reserve_bytes=settings.memory_reserve_bytes,
    )
    if settings.kind == "simulated":
        from modelyard.fleet.simulated import SimulatedFleet

        return SimulatedFleet(data.replicas, clock, machine, fence)
    from modelyard.fleet.local import LocalFleet

    return LocalFleet(data.replicas, clock, machine, fence)


def _engines(config: Config, data: DataDirectory) -> "Engines":
    """Return every engine by its name."""
    from modelyard.engines.llamacpp import LlamaCppEngine
    from modelyard.engines.onnx import OnnxEngine
    from modelyard.engines.providers.engines import provider_engines
    from modelyard.engines.sglang import SglangEngine
    from modelyard.engines.simulated import SimulatedEngine
    from modelyard.engines.tensorrt_llm import TensorRtLlmEngine
    from modelyard.engines.tgi import TgiEngine
    from modelyard.engines.triton import TritonEngine
    from modelyard.engines.vllm import VllmEngine

    engines: list[Engine] = [LlamaCppEngine(), OnnxEngine(), SimulatedEngine(), VllmEngine(config.engines.vllm)]
    engines += provider_engines(
        os.environ,
        data.provider_keys,
        private_networks=config.fetch.private_networks,
        authorities=config.fetch.ca_file,
    )
    engines += [SglangEngine(config.engines.sglang), TensorRtLlmEngine(config.engines.tensorrt_llm)]
    engines += [TgiEngine(config.engines.tgi), TritonEngine(config.engines.triton)]
    return {engine.name: engine for engine in engines}


def stop_engines(data: DataDirectory, *, grace_s: float) -> None:
    """Stop every engine that runs for this data directory; returns when they are gone."""
    from modelyard.fleet import local, simulated

    simulated.stop_all(data.replicas, grace_s)
    local.stop_all(data.replicas, grace_s)


def _run(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a plane under uvloop; SIGTERM and SIGINT ask it to stop, once and for all."""
    import uvloop

    async def until_stopped() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    uvloop.run(until_stopped())
