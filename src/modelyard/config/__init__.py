"""Every setting, with its default and the reason for it.

One frozen ``Config`` is built once, from the built-in defaults, then the TOML
file, then environment variables (``MODELYARD__GATEWAY__PORT=9000``, lists with
commas); later wins. Nothing else in the package reads the environment or a
settings file.
``docs/reference/configuration.md`` lists every setting, and a test keeps it
complete.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from modelyard.config.batch import BatchConfig
from modelyard.config.billing import BillingConfig, PriceConfig
from modelyard.config.books import KafkaConfig, StripeConfig
from modelyard.config.directory import DataDirectory as DataDirectory
from modelyard.errors import StartupError

ENV_PREFIX = "MODELYARD__"
_FAULTS_MAX = 20

Positive = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]  # a year: timers and sums never meet infinity
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data plane."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that nothing is exposed before you decide it."""
    port: Port = 8484
    """Port to listen on; 0 takes a free one (tests)."""
    public_url: str = ""
    """URL that callers use, like ``https://models.example.com``, for links in answers; empty: http and their Host."""
    workers: PositiveInt = 1
    """Worker processes (SO_REUSEPORT). Limits and slots are divided among them, so they pay past one busy core only."""
    body_bytes_max: PositiveInt = 32 * 1024 * 1024
    """Largest request body. Prompts with images need megabytes, nothing honest needs more."""
    file_bytes_max: PositiveInt = 512 * 1024 * 1024
    """Largest file that may be uploaded to ``/v1/files``; it is passed on as it comes, and never held."""
    header_bytes_max: PositiveInt = 16 * 1024
    """Largest request head: request line and headers."""
    headers_max: PositiveInt = 64
    """Most headers in a request."""
    queue_max: PositiveInt = 256
    """Requests that may wait for one endpoint; the next one is refused at once (429, or 503 while it loads)."""
    queue_bytes_max: PositiveInt = 256 * 1024 * 1024
    """Bytes of request bodies that may wait for one endpoint."""
    queue_wait_s: Positive = 30.0
    """Longest wait for a busy endpoint before 429."""
    load_wait_s: Positive = 600.0
    """Longest wait for a cold endpoint before 503; a big model loads for minutes."""
    connect_timeout_s: Positive = 2.0
    """Time to open a connection to a replica."""
    first_token_timeout_s: Positive = 120.0
    """Time from dispatch to the first token of a stream."""
    token_timeout_s: Positive = 30.0
    """Longest pause between two tokens of a stream."""
    total_timeout_s: Positive = 120.0
    """Longest request from its dispatch, stream or not; an endpoint of long answers sets its own."""
    retry_share_max: Share = 0.1
    """Retries on other replicas, as a share of an endpoint's requests; more would turn a failure into a storm."""
    error_share_max: Share = 0.1
    """Share of failed requests of a replica (never 4xx) above which its circuit opens."""
    ejection_share_max: Share = 0.5
    """Largest share of an endpoint's replicas that are kept away from requests at once for failing."""
    kv_share_max: Share = 0.97
    """Share of a replica's KV cache that requests may reserve; gateway workers have equal parts of it."""
    kept_share_max: Share = 0.0625
    """Largest share of an endpoint's running requests that is kept free for tenants which ask for little, while another
    one asks for all there is; 0: none. See ``docs/explanation/fairness.md``."""
    header_read_timeout_s: Positive = 10.0
    """Time for a client to send a request head; slow senders are closed."""
    body_bytes_per_s_min: PositiveInt = 1024
    """Slowest pace of a request body, after a grace of 'header_read_timeout_s'; slower senders are closed."""
    connections_max: Count = 0
    """Open connections of clients to one worker, more are refused with 503; 0: two fifths of the files it may open."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser, like ``https://app.example.com``; ``*`` is any."""
    tls_certificate: str = ""
    """PEM file with the certificate chain; together with 'tls_key' it turns on TLS."""
    tls_key: str = ""
    """PEM file with the private key of 'tls_certificate'."""
    idle_timeout_s: Positive = 75.0
    """Time an idle keep-alive connection of a client is kept."""
    write_stall_timeout_s: Positive = 60.0
    """Time a client may read nothing of a stream before it is closed."""
    drain_timeout_s: Positive = 30.0
    """Time running requests get to finish at shutdown."""
    loading_comment_s: Positive = 2.0
    """Pause between two ': loading' comments of a stream that waits for a cold model."""
    max_tokens_default: PositiveInt = 4096
    """Output tokens of a request that names no limit; without a cap one request could hold a replica for an hour."""
    image_links: bool = False
    """Fetch pictures that requests name by https links. Off: only ``data:`` URLs and forms, since whoever names a link
    chooses where this machine connects to; 'fetch.private_networks' bounds it."""
    image_bytes_max: PositiveInt = 10 * 1024 * 1024
    """Largest picture that is fetched."""
    image_timeout_s: Positive = 10.0
    """Time to fetch a picture."""
    journal_sync_s: Positive = 0.05
    """Longest time a journal record is not yet on disk (power loss); a killed process loses nothing."""
    mark_tokens: PositiveInt = 64
    """Tokens of a stream between two progress marks in the journal."""
    mark_s: Positive = 1.0
    """Seconds between two progress marks in the journal."""
    kept_answer_bytes_max: PositiveInt = 4 * 1024 * 1024
    """Largest answer that is kept for a detached request or an Idempotency-Key."""
    why_served_max: PositiveInt = 20_000
    """Requests that a worker remembers for 'modelyard why', some 500 bytes each."""
    why_refused_max: PositiveInt = 5_000
    """Refused requests that a worker remembers for 'modelyard why'."""
    metrics_public: bool | None = None
    """Whether /metrics answers without a key; unset: only while 'host' is a loopback address."""


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The control plane."""

    database_url: str = ""
    """SQLAlchemy URL; empty: SQLite in the data directory."""
    pass_interval_s: Positive = 1.0
    """Pause between two reconcile passes when nothing happens; events start one at once."""
    lease_s: Positive = 10.0
    """Time without a sign of the controller that leads before another one of the same database takes over."""
    database_timeout_s: Positive = 2.0
    """Longest wait for a locked database before a write is refused with 503."""
    delivery_interval_s: Positive = 0.2
    """Pause between two deliveries of the journal into the ledger."""
    usage_rows_days: Count = 90
    """Days that the ledger keeps the row of each request; sums by hour and day are kept for good. 0: rows too."""
    replica_grace_s: Positive = 10.0
    """Time a replica gets between SIGTERM and SIGKILL, after it was drained."""
    drain_timeout_s: Positive = 120.0
    """Longest time a replica may drain before it is stopped all the same."""
    warm_pool_accelerators: Count = 8
    """Most accelerators that warm pools hold together."""
    min_residency_s: Positive = 60.0
    """Time a replica stays once it is ready, before an endpoint that has no room may take its place; twice as long is
    the most that one waits for idle ones that are dearer to load."""
    moves: Literal["off", "room", "all"] = "off"
    """When replicas that share an accelerator move to others while they serve. ``room``: one finds no room, since what
    is free lies in pieces. ``all``: also every minute, away from accelerators with too much to do, and off those with
    little on them. A move loads the model once more, and holds its memory twice until the new one is ready."""
    moves_at_once: PositiveInt = 4
    """Most replicas that move at the same time."""
    sleepers_bytes: Count = 0
    """Memory of a node that weights of engines which sleep may take; who has slept longest goes. 0: a quarter of it."""
    crash_backoff_s: Positive = 1.0
    """First pause before a crashed replica is started again; doubles up to 'crash_backoff_max_s'."""
    crash_backoff_max_s: Positive = 60.0
    """Longest pause between two starts of a crashing replica."""
    hang_timeout_s: Positive = 30.0
    """Time a ready replica may fail its probes, or compute nothing while it has requests, before it is killed."""
    rollout_interval_s: Positive = 1.0
    """Pause between two looks at the rollouts that are under way."""
    keep_previous_s: Count = 600
    """Seconds that the previous version keeps its replicas after a rollout, so that going back takes no load."""
    kept_s: Positive = 86_400.0
    """Time that detached requests, and answers to an Idempotency-Key, are kept."""
    kept_requests_max: PositiveInt = 10_000
    """Kept requests of one tenant; the next one is refused with 429."""
    kept_bytes_max: PositiveInt = 1024 * 1024 * 1024
    """Bytes of kept answers of one tenant; above it, a new request to be kept is refused with 429."""
    events_kept_s: Positive = 2_592_000.0
    """Time that events of tenants and their deliveries are kept, and can be replayed."""
    webhook_failing_s: Positive = 432_000.0
    """Time without a success after which a webhook is disabled; the retries of one delivery end after three days."""
    upload_bytes_max: PositiveInt = 512 * 1024 * 1024 * 1024
    """Largest artifact that may be uploaded."""
    upload_bytes_held_max: PositiveInt = 1024 * 1024 * 1024 * 1024
    """Bytes of one tenant's uploads, complete ones too; what would pass it is refused with 429."""
    uploads_open_max: PositiveInt = 32
    """Uploads of one tenant that are not complete; the next one is refused with 429."""
    upload_ttl_s: Positive = 86_400.0
    """Time since its last part that an upload is kept, and a complete one that no version uses."""
    batch_file_bytes_max: PositiveInt = 200 * 1024 * 1024
    """Largest file whose purpose is ``batch``."""
    files_held_max: PositiveInt = 10_000
    """Files of one tenant, outputs of batches too; the next upload is refused with 429."""
    file_bytes_held_max: PositiveInt = 100 * 1024 * 1024 * 1024
    """Bytes of one tenant's files; an upload that would pass it is refused with 429."""
    batch_file_ttl_s: Positive = 2_592_000.0
    """Time after which a file of the purpose ``batch`` expires if its upload said nothing of it."""
    artifact_ttl_s: Positive = 86_400.0
    """Time that artifacts which no version names, halves of fetches and corrupt files are kept before removal."""
    artifact_cache_bytes: Count = 0
    """Bytes of artifacts above which those that nothing runs and that can be fetched again go, unused longest first;
    0: no limit."""


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where replicas run."""

    kind: Literal["local", "simulated"] = "local"
    """``local``: processes of this machine; ``simulated``: many simulated engines in one process, for trials."""
    threads: Count = 0
    """CPU threads a replica may use; 0: all cores of the machine."""
    memory_reserve_bytes: Count = 512 * 1024 * 1024
    """Memory of this machine that no replica is placed in: the platform's own, and the system's."""
    nodes_file: str = ""
    """TOML file of ``[[nodes]]`` beside this machine, like ``fleet.toml``; relative to the data directory."""
    accelerator_prices: dict[str, Annotated[float, msgspec.Meta(ge=0, le=100_000)]] = {}
    """US dollars of one accelerator for an hour by its kind, like ``h100 = 2.5``: for ``modelyard fit``; the price of a
    declared node comes before it."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Nodes as tables ``[[fleet.nodes]]``, instead of a file or beside it (docs/how-to/nodes-and-accelerators.md)."""


class EnginesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How engines are called that are installed beside the platform, each in an environment of its own."""

    vllm: tuple[str, ...] = ("vllm",)
    """Words that begin vLLM's command, like ``/opt/vllm/bin/vllm``; ``serve`` and its flags follow."""
    sglang: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    """Words that begin SGLang's command."""
    tensorrt_llm: tuple[str, ...] = ("trtllm-serve",)
    """Words that begin TensorRT-LLM's command."""
    tgi: tuple[str, ...] = ("text-generation-launcher",)
    """Words that begin the command of Text Generation Inference."""
    triton: tuple[str, ...] = ("tritonserver",)
    """Words that begin Triton's command."""


class S3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object store of ``s3://`` artifacts."""

    endpoint: str = ""
    """URL of the store, like ``https://minio.example.com:9000``; empty: AWS in 'region'."""
    region: str = "us-east-1"
    """Region that requests are signed for."""
    access_key: str = ""
    """Key that requests are signed with; empty: not signed, for public buckets."""
    secret_key: str = ""
    """Secret of 'access_key'; never shown nor logged. Better given as MODELYARD__FETCH__S3__SECRET_KEY."""
    session_token: str = ""
    """Token of temporary credentials."""
    shared_prefixes: tuple[str, ...] = ()
    """Prefixes that every tenant may deploy from, like ``models/public/`` (bucket, then key); else admins only."""

    def __repr__(self) -> str:
        """Return it without its secrets."""
        return f"S3Config(endpoint={self.endpoint!r}, region={self.region!r})"


class FetchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is fetched from elsewhere: webhooks, artifacts."""

    private_networks: tuple[str, ...] = ()
    """Networks of your own that webhooks may be sent to and artifacts fetched from, like ``10.1.0.0/16``, also by
    http; else none is reached."""
    ca_file: str = ""
    """PEM file with certificates of authorities of your own, trusted beside those of the system."""
    artifact_bytes_max: PositiveInt = 2 * 1024 * 1024 * 1024 * 1024
    """Largest artifact."""
    parallel: PositiveInt = 4
    """Parts of a file that are fetched at once, where its server can give parts."""
    part_bytes: PositiveInt = 16 * 1024 * 1024
    """Bytes of a part: what a fetch that is cut off loses at most, of each part under way."""
    hf_endpoint: str = "https://huggingface.co"
    """The hub of ``hf://`` artifacts."""
    hf_token: str = ""
    """Token for the hub; whoever may deploy may then deploy what it can read. Never shown nor logged."""
    pypi_index: str = "https://pypi.org/simple"
    """The index of ``pypi:`` artifacts; it must speak the JSON simple API (PEP 691)."""
    s3: S3Config = S3Config()
    """The object store of ``s3://`` artifacts."""

    def __repr__(self) -> str:
        """Return it without its secrets."""
        return f"FetchConfig(hf_endpoint={self.hf_endpoint!r}, pypi_index={self.pypi_index!r}, s3={self.s3!r})"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration; ``modelyard.toml`` has one table for each field."""

    gateway: GatewayConfig = GatewayConfig()
    """The data plane."""
    control: ControlConfig = ControlConfig()
    """The control plane."""
    fleet: FleetConfig = FleetConfig()
    """Where replicas run."""
    engines: EnginesConfig = EnginesConfig()
    """How engines are called that are installed beside the platform."""
    fetch: FetchConfig = FetchConfig()
    """What is fetched from elsewhere: webhooks, artifacts."""
    batch: BatchConfig = BatchConfig()
    """Batches: their workers, and what they cost."""
    prices: dict[str, PriceConfig] = {}
    """Price of each model by its endpoint name, or of one version by ``"NAME@VERSION"``; ``"*"`` prices all others;
    without one, use is metered and free."""
    billing: BillingConfig = BillingConfig()
    """Money: currency, invoices, notices."""
    kafka: KafkaConfig = KafkaConfig()
    stripe: StripeConfig = StripeConfig()


def _lists(section: type[msgspec.Struct], *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of the settings that are lists."""
    for field in msgspec.structs.fields(section):
        if get_origin(field.type) is tuple:
            yield (*path, field.name)
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _lists(field.type, *path, field.name)


_LISTS = frozenset(_lists(Config))


def load(file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration from ``file`` (if any), ``environment`` and ``overrides`` (nested, strongest).

    Raises:
        StartupError: a file that cannot be read or parsed, an unknown setting, a wrong value.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        merged = _read_toml(file)
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _put(merged, path, _items(text) if tuple(path) in _LISTS else text)
    _merge(merged, overrides or {})
    try:
        return msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as error:
        faults = list(islice(_faults(merged, Config, ""), _FAULTS_MAX)) or [str(error)]
        told: dict[str, list[str]] = {}
        for fault in faults:
            told.setdefault(_source(fault, file, environment), []).append(f"{_plain(fault)}.{_did_you_mean(fault)}")
        what = f"Bad setting{'s' if len(faults) > 1 else ''} in "
        what += " And in ".join(f"{where}: {' '.join(reasons)}" for where, reasons in told.items())
        raise StartupError(f"{what} See docs/reference/configuration.md.") from error


def _faults(tree: Mapping[str, Any], section: type[msgspec.Struct], path: str) -> Iterator[str]:
    """Yield all that is wrong with a section, each as msgspec says it, which stops at the first."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(section)}
    for name, value in tree.items():
        if name not in types:
            yield f"Object contains unknown field `{name}`" + (f" - at `${path}`" if path else "")
            continue
        yield from _faults_of(value, types[name], f"{path}.{name}")


def _faults_of(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Yield what is wrong with a setting of any kind."""
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _faults(value, kind, path)
        return
    if isinstance(value, dict) and get_origin(kind) is dict:
        of_key, of_value = get_args(kind)
        for key, item in value.items():
            yield from _faults_of(key, of_key, f"{path}.{key}")
            yield from _faults_of(item, of_value, f"{path}.{key}")
        return
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        what, _, rest = str(error).partition(" - at `$")
        if get_origin(kind) is Literal:
            what += f" (one of {', '.join(get_args(kind))})"
        yield f"{what} - at `${path}{rest.removesuffix('`')}`"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise StartupError(f"Cannot read the configuration {file}: {error.strerror}. Check --config.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{file} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise StartupError(f"{file} is nested too deeply.") from error


def _items(text: str) -> list[str]:
    """Return the items of a list in a variable, where they are separated by commas."""
    return [item for piece in text.split(",") if (item := piece.strip())]


def _put(tree: dict[str, Any], path: list[str], value: str | list[str]) -> None:
    for step in path[:-1]:
        branch = tree.setdefault(step, {})
        if not isinstance(branch, dict):
            return  # the check of types reports what stands in the way
        tree = branch
    tree[path[-1]] = value


def _merge(tree: dict[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if not isinstance(value, Mapping):
            tree[name] = value
            continue
        branch = tree.setdefault(name, {})
        if isinstance(branch, dict):  # else as in _put
            _merge(branch, value)


def _source(error: str, file: Path | None, environment: Mapping[str, str]) -> str:
    """Name the variable that set what ``error`` complains about, or the file."""
    path = re.search(r"`\$([^`]*)`", error)
    field = re.search(r"unknown field `([^`]*)`", error)
    steps = [*(path[1].split(".")[1:] if path else []), *([field[1]] if field else [])]
    wanted = ENV_PREFIX + "__".join(steps).upper()
    for name in environment:
        if name.upper() == wanted or (steps and name.upper().startswith(wanted + "__")):
            return name
    return f"{file}" if file else "the environment (MODELYARD__…)"


def _plain(error: str) -> str:
    """Return msgspec's complaint in the words of ``docs/reference/configuration.md``, the setting first."""
    what, _, path = error.partition(" - at ")
    setting = path.strip("`").removeprefix("$").removeprefix(".").replace("[...]", ".<model>")
    what = re.sub(r"Object contains unknown field `([^`]*)`", r"unknown setting '\1'", what)
    names = {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "object": "a table"}
    what = re.sub(r"`(\w+)[^`]*`", lambda kind: names.get(kind[1], kind[1]), what)
    what = what[:1].lower() + what[1:]
    return f"{setting}: {what}" if setting else what


def _did_you_mean(error: str) -> str:
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", error)
    if unknown is None:
        return ""
    import difflib

    names = ("gateway", "control", "fleet", "engines", "fetch", "batch", "billing", "kafka", "stripe")
    sections = {name: getattr(Config(), name) for name in names}
    sections |= {"": Config(), "fetch.s3": S3Config(), "billing.smtp": BillingConfig().smtp}
    section = sections.get(unknown[2] or "", PriceConfig())
    close = difflib.get_close_matches(unknown[1], section.__struct_fields__, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
