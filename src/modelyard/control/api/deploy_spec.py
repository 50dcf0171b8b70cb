"""A deploy request, and everything that can be wrong with one, found in one go; pure."""

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Protocol

import msgspec

from modelyard.control.api.autoscale import AutoscaleBody
from modelyard.control.api.faults import Fault
from modelyard.control.api.serving import ServingBody
from modelyard.domain import scaling_bounds
from modelyard.domain.catalog import NAME_PATTERN
from modelyard.domain.endpoints import EndpointStatus
from modelyard.engines import Engine, Engines, GuestKind, Options

ARTIFACT = (
    "Where the weights are: https://, s3:// or hf://, pypi:, upload:sha256:… of an upload of yours, model:NAME@VERSION "
    "of the registry, or file:///path (admin only)."
)
BASE = "NAME@VERSION that an adapter is loaded onto."
ACCELERATORS_MAX = 64
OPTIONS_MAX = 64

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_PATH = re.compile(r"\s*(/|~|\.\.|file:|[A-Za-z]:\\)")
RESERVED_TAILS = (
    "/canary", "/events", "/forecast", "/logs", "/pause", "/promote", "/releases", "/resume", "/rollback", "/rollout",
    "/stats", "/why",
)  # fmt: skip
"""What comes after an endpoint in the path of a route: ``GET /v1/endpoints/a/events`` must mean one thing."""


def _whole(least: int, text: str) -> Any:
    # Told to readers, enforced by ``faults_of``, which lists all faults; msgspec would stop at the first.
    return msgspec.Meta(description=text, extra_json_schema={"minimum": least})


class HardwareBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replica runs on, and how many there may be."""

    gpu_type: Annotated[
        str | None,
        msgspec.Meta(description="Accelerator; 'cpu' on this machine. Left out: the cheapest of the fleet that fits."),
    ] = None
    gpu_count: Annotated[int | None, _whole(1, "Accelerators a replica; left out: as many as it needs.")] = None
    min_replicas: Annotated[int, _whole(0, "Fewest replicas; 0 needs scale_to_zero.")] = 1
    max_replicas: Annotated[int | None, _whole(1, "Most replicas; left out: as many as min_replicas.")] = None


class Hardware(msgspec.Struct, frozen=True):
    """Accelerators of a replica, and why these: "" as they were asked for."""

    gpu_type: str
    gpu_count: int
    reason: str = ""


class Accelerators(Protocol):
    """What says on which accelerators a replica runs."""

    @property
    def gpu_type(self) -> str:
        """Their kind."""
        ...

    @property
    def gpu_count(self) -> int:
        """How many."""
        ...


class ScalingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the number of replicas changes."""

    metric: Annotated[str, msgspec.Meta(description="'queue_depth' or 'gpu_utilization'.")] = "queue_depth"
    target_value: Annotated[
        float, msgspec.Meta(description="What a replica is meant to have: queued requests, or utilisation in percent.")
    ] = 70.0
    scale_to_zero: Annotated[bool, msgspec.Meta(description="Stop all replicas when idle.")] = False
    scale_to_zero_after_idle_seconds: Annotated[
        float | msgspec.UnsetType,
        msgspec.Meta(description="Quiet time before that; left out, it is learned from its own, 300 until then."),
    ] = msgspec.UNSET


class DeployRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model to serve."""

    model_name: Annotated[str, msgspec.Meta(description="What callers put into 'model'.")]
    framework: Annotated[
        str,
        msgspec.Meta(
            description="The engine, like 'llamacpp'; a registered version has its own, an adapter that of its base."
        ),
    ] = ""
    model_artifact: Annotated[str, msgspec.Meta(description=ARTIFACT)] = ""
    hardware: HardwareBody = HardwareBody()
    scaling: ScalingBody = ScalingBody()
    version: Annotated[str | None, msgspec.Meta(description="Left out: the next of v1, v2, …")] = None
    options: Annotated[Options, msgspec.Meta(description="The engine's own settings.")] = {}
    base: Annotated[str, msgspec.Meta(description=BASE)] = ""
    host: Annotated[
        str,
        msgspec.Meta(
            description="Endpoint on whose replicas it is to sit as a guest; left out, an adapter finds one by itself."
        ),
    ] = ""
    shared: Annotated[bool, msgspec.Meta(description="Every tenant may call it (admin only).")] = False
    serving: ServingBody = ServingBody()
    autoscale: AutoscaleBody = AutoscaleBody()


class DeployAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The deployment was taken on; GET /v1/endpoints/{endpoint_id} tells how far it is."""

    endpoint_id: str
    status: EndpointStatus
    estimated_ready_seconds: int
    endpoint_url: str
    hardware: Annotated[
        Hardware | None, msgspec.Meta(description="What a replica runs on and why, where the request left it out.")
    ] = None
    warnings: Annotated[
        tuple[str, ...], msgspec.Meta(description="What was taken on, and may not be what is meant.")
    ] = ()


EXAMPLE = {
    "model_name": "smol",
    "model_artifact": "file:///models/smollm2-135m-instruct-q8_0.gguf",
    "framework": "llamacpp",
    "hardware": {"min_replicas": 1, "max_replicas": 2},
    "scaling": {"scale_to_zero": True, "scale_to_zero_after_idle_seconds": 300},
}


def endpoint_faults(
    wanted: DeployRequest, chosen: Accelerators, engine: Engine | None, kinds: Collection[str]
) -> list[Fault]:
    """Return the faults of the endpoint that is to be; those of its version are another's to find.

    ``kinds`` are the accelerators of the fleet that can run an engine with weights.
    """
    hardware, scaling = wanted.hardware, wanted.scaling
    return [
        *name_faults(wanted.model_name),
        *hardware_faults(chosen, engine, kinds),
        *replica_faults("hardware.", hardware.min_replicas, hardware.max_replicas, zero=scaling.scale_to_zero),
        *_scaling_faults(scaling),
    ]


def guest_faults(wanted: DeployRequest, engine: Engine | None) -> Iterator[Fault]:
    """Yield what is asked for that a guest does not have: replicas of its own, and seats on them."""
    rule = "a guest has no replicas of its own, they are its host's; leave this out"
    asked = {
        "hardware": (wanted.hardware, (HardwareBody(), HardwareBody(max_replicas=1))),
        "scaling": (wanted.scaling, (ScalingBody(),)),
        "autoscale": (wanted.autoscale, (AutoscaleBody(),)),
    }
    for name, (given, defaults) in asked.items():
        if given not in defaults:
            yield Fault(name, rule)
    yield from seat_faults(wanted.options, engine)


def seat_faults(options: Options, engine: Engine | None) -> Iterator[Fault]:
    """Yield that a guest offers seats to others; of an adapter every option is refused already."""
    if engine is not None and engine.guests is GuestKind.MODEL and options.get(engine.guests_option):
        yield Fault(f"options.{engine.guests_option}", "a guest takes in no guests, its host does; leave this out")


def name_faults(name: str) -> Iterator[Fault]:
    """Yield what is wrong with the name of a model."""
    if NAME_PATTERN.fullmatch(name) is None:
        yield Fault(
            "model_name",
            "use 1 to 96 letters, digits, '.', '_' or '-', beginning with a letter or digit; one '/' may follow",
        )
    elif name.lower().endswith(RESERVED_TAILS):
        tail = name.lower().rpartition("/")[2]
        yield Fault("model_name", f"a name cannot end in '/{tail}', which is a route; use another word after the '/'")


def version_faults(version: str | None) -> Iterator[Fault]:
    """Yield what is wrong with a version's name."""
    if version is not None and _VERSION.fullmatch(version) is None:
        yield Fault("version", "use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")


def engine_faults(framework: str, engine: Engine | None, engines: Engines) -> Iterator[Fault]:
    """Yield why ``engine``, which is that of ``framework``, cannot be had."""
    if not framework:
        yield Fault("framework", "is required, unless model_artifact is model:NAME@VERSION; it names the engine")
    elif engine is None:
        known = ", ".join(f"'{name}'" for name in sorted(engines))
        yield Fault("framework", f"there is no engine '{framework[:64]}' here; available: {known}")
    elif why := engine.missing():
        yield Fault("framework", why)


def hardware_faults(hardware: Accelerators, engine: Engine | None, kinds: Collection[str]) -> Iterator[Fault]:
    """Yield what is wrong with the accelerators of a replica; ``kinds`` are those that there are."""
    # An engine without weights computes nothing, so it has whatever accelerator it is said to have.
    if engine is not None and engine.needs_artifact and hardware.gpu_type not in kinds:
        known = ", ".join(f"'{kind}'" for kind in sorted(kinds))
        yield Fault("hardware.gpu_type", f"there is no accelerator '{hardware.gpu_type[:64]}' here; available: {known}")
    elif not re.fullmatch(r"[A-Za-z0-9._-]{1,32}", hardware.gpu_type):
        yield Fault("hardware.gpu_type", "use letters, digits, '.', '_' or '-'")
    if not 1 <= hardware.gpu_count <= ACCELERATORS_MAX:
        yield Fault("hardware.gpu_count", f"must be 1 to {ACCELERATORS_MAX}")


def replica_faults(prefix: str, least: int, most: int | None, *, zero: bool) -> Iterator[Fault]:
    """Yield what is wrong with bounds of replicas; ``prefix`` is of their fields, ``zero``: they may all sleep."""
    return (Fault(f"{prefix}{name}", why) for name, why in scaling_bounds.of_replicas(least, most, zero=zero))


def idle_faults(name: str, idle_s: float) -> Iterator[Fault]:
    """Yield what is wrong with the quiet time before sleep."""
    return (Fault(name, why) for why in scaling_bounds.of_idle(idle_s))


def target_faults(metric: str, target_value: float) -> Iterator[Fault]:
    """Yield what is wrong with what the size follows."""
    return (Fault(f"scaling.{name}", why) for name, why in scaling_bounds.of_target(metric, target_value))


def _scaling_faults(scaling: ScalingBody) -> Iterator[Fault]:
    yield from target_faults(scaling.metric, scaling.target_value)
    if (idle_s := scaling.scale_to_zero_after_idle_seconds) is not msgspec.UNSET:
        yield from idle_faults("scaling.scale_to_zero_after_idle_seconds", idle_s)


def option_faults(options: Options, *, is_admin: bool) -> Iterator[Fault]:
    """Yield which options may not be given; the engine finds what else is wrong with them."""
    if len(options) > OPTIONS_MAX:
        yield Fault("options", f"at most {OPTIONS_MAX} options")
    for name, value in options.items():
        # Engines run as the operator's user: a path of the host is the operator's to give.
        if not is_admin and isinstance(value, str) and _HOST_PATH.match(value):
            yield Fault(f"options.{name[:64]}", "a path of the host needs a key with the scope 'admin'")
