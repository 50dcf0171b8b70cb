"""Nouns to rows and back; nothing else knows which column holds which field."""

from functools import lru_cache
from typing import Any, TypedDict

import msgspec
import sqlalchemy as sa

from modelyard.domain.catalog import Artifact, ArtifactFile, ModelVersion, VersionStatus
from modelyard.domain.endpoints import Autoscale, Endpoint, EndpointStatus, Progress, Release, Scaling, Serving
from modelyard.domain.facts import ModelFacts
from modelyard.domain.fleet import GuestSeat, Replica, ReplicaState
from modelyard.domain.nodes import Placement
from modelyard.domain.rollouts import Rollout
from modelyard.domain.tenants import ApiKey, Limits, Plan, Scope, Tenant
from modelyard.domain.usage import MICRO_PER_UNIT, Unit, UsageRow, UsageStatus
from modelyard.stores import Event

Values = dict[str, Any]
"""One row by column, as SQLAlchemy takes it."""


class _GpuRequirement(TypedDict):
    """The source's ``gpu_requirement``: ``{type: "h100", count: 4}``."""

    type: str
    count: int


_to_json = msgspec.json.Encoder().encode
_limits = msgspec.json.Decoder(Limits).decode
_scopes = msgspec.json.Decoder(tuple[Scope, ...]).decode
_models = msgspec.json.Decoder(tuple[str, ...]).decode
_options = msgspec.json.Decoder(dict[str, str | int | float | bool]).decode
_gpu = msgspec.json.Decoder(_GpuRequirement).decode
_progress = msgspec.json.Decoder(Progress).decode
_event_data = msgspec.json.Decoder(dict[str, str | int | float | bool | None]).decode
# Frozen values that many rows share, read at every round of the reconciler: decoded once.
_serving = lru_cache(4096)(msgspec.json.Decoder(Serving).decode)
_autoscale = lru_cache(4096)(msgspec.json.Decoder(Autoscale).decode)
rollout_of = lru_cache(4096)(msgspec.json.Decoder(Rollout | None).decode)
_facts = lru_cache(4096)(msgspec.json.Decoder(ModelFacts).decode)
_files = lru_cache(4096)(msgspec.json.Decoder(tuple[ArtifactFile, ...]).decode)
_seats = lru_cache(4096)(msgspec.json.Decoder(tuple[GuestSeat, ...]).decode)
_placement = lru_cache(4096)(msgspec.json.Decoder(Placement).decode)


def _json(value: object) -> str:
    return _to_json(value).decode()


def tenant_values(tenant: Tenant) -> Values:
    """Return the row of a tenant."""
    return {
        "tenant_id": tenant.id,
        "name": tenant.name,
        "created_at": tenant.created_at,
        "limits": _json(tenant.limits),
        "is_suspended": tenant.is_suspended,
        "plan": tenant.plan.value,
        "weight": tenant.weight,
    }


def tenant_of(row: sa.RowMapping) -> Tenant:
    """Return the tenant of a row."""
    return Tenant(
        id=row["tenant_id"],
        name=row["name"],
        created_at=row["created_at"],
        limits=_limits(row["limits"]),
        is_suspended=row["is_suspended"],
        plan=Plan(row["plan"]),
        weight=row["weight"],
    )


def key_values(key: ApiKey) -> Values:
    """Return the row of an API key."""
    return {
        "api_key_id": key.id,
        "tenant_id": key.tenant_id,
        "name": key.name,
        "secret_hash": key.secret_hash,
        "scopes": _json(key.scopes),
        "created_at": key.created_at,
        "last4": key.last4,
        "limits": _json(key.limits),
        "models": None if key.models is None else _json(key.models),
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "previous_hash": key.previous_hash,
        "previous_expires_at": key.previous_expires_at,
    }


def key_of(row: sa.RowMapping) -> ApiKey:
    """Return the API key of a row."""
    return ApiKey(
        id=row["api_key_id"],
        tenant_id=row["tenant_id"],
        name=row["name"],
        secret_hash=bytes(row["secret_hash"]),
        scopes=_scopes(row["scopes"]),
        created_at=row["created_at"],
        last4=row["last4"],
        limits=_limits(row["limits"]),
        models=None if row["models"] is None else _models(row["models"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        previous_hash=None if row["previous_hash"] is None else bytes(row["previous_hash"]),
        previous_expires_at=row["previous_expires_at"],
    )


def version_values(version: ModelVersion) -> Values:
    """Return the row of a model version."""
    return {
        "model_id": version.id,
        "owner_id": version.tenant_id,
        "name": version.name,
        "version": version.version,
        "framework": version.framework,
        "config": _json(version.options),
        "created_at": version.created_at,
        **version_changes(version),
    }


def version_changes(version: ModelVersion) -> Values:
    """Return what may change of a version: its status, and what was learned of its artifact."""
    return {
        "artifact_path": version.artifact.uri,
        "artifact_digest": version.artifact.digest,
        "artifact_size": version.artifact.size_bytes,
        "gpu_requirement": _json(_GpuRequirement(type=version.gpu_type, count=version.gpu_count)),
        "memory_required": version.memory_bytes,
        "status": version.status.value,
        "facts": _json(version.facts),
        "files": _json(version.artifact.files),
        "base_id": version.base_id,
        "parent_id": version.parent_id,
    }


def version_of(row: sa.RowMapping) -> ModelVersion:
    """Return the model version of a row."""
    gpu = _gpu(row["gpu_requirement"])
    return ModelVersion(
        id=row["model_id"],
        tenant_id=row["owner_id"],
        name=row["name"],
        version=row["version"],
        framework=row["framework"],
        artifact=Artifact(row["artifact_path"], row["artifact_digest"], row["artifact_size"], _files(row["files"])),
        options=_options(row["config"]),
        created_at=row["created_at"],
        status=VersionStatus(row["status"]),
        gpu_type=gpu["type"],
        gpu_count=gpu["count"],
        memory_bytes=row["memory_required"],
        facts=_facts(row["facts"]),
        base_id=row["base_id"],
        parent_id=row["parent_id"],
    )


def endpoint_values(endpoint: Endpoint) -> Values:
    """Return the row of an endpoint, without its releases."""
    scaling = endpoint.scaling
    return {
        "endpoint_id": endpoint.id,
        "owner_id": endpoint.tenant_id,
        "name": endpoint.name,
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "scale_to_zero": scaling.scale_to_zero,
        "idle_s": scaling.idle_s,
        "scaling_metric": scaling.metric,
        "scaling_target": scaling.target_value,
        "is_shared": endpoint.is_shared,
        "is_deleted": endpoint.is_deleted,
        "created_at": endpoint.created_at,
        "serving": _json(endpoint.serving),
        "autoscale": _json(endpoint.autoscale),
        "rollout": _json(endpoint.rollout),
        "pool": endpoint.pool,
        "host_id": endpoint.host_id,
        **outlook_values(endpoint.status, endpoint.progress, endpoint.failure),
    }


def outlook_values(status: EndpointStatus, progress: Progress, failure: str) -> Values:
    """Return what a row tells of an endpoint, as the reconciler sees it."""
    return {"status": status.value, "progress": _json(progress), "failure": failure}


def release_values(endpoint: Endpoint) -> list[Values]:
    """Return the rows of an endpoint's releases."""
    return [
        {
            "endpoint_id": endpoint.id,
            "position": at,
            "model_id": release.version_id,
            "weight": release.weight,
            "shadow": release.shadow,
            "fallback": release.fallback,
        }
        for at, release in enumerate(endpoint.releases)
    ]


def endpoint_of(row: sa.RowMapping, releases: tuple[Release, ...]) -> Endpoint:
    """Return the endpoint of a row and its releases."""
    return Endpoint(
        id=row["endpoint_id"],
        tenant_id=row["owner_id"],
        name=row["name"],
        releases=releases,
        scaling=Scaling(
            min_replicas=row["min_replicas"],
            max_replicas=row["max_replicas"],
            scale_to_zero=row["scale_to_zero"],
            idle_s=row["idle_s"],
            metric=row["scaling_metric"],
            target_value=row["scaling_target"],
        ),
        created_at=row["created_at"],
        is_shared=row["is_shared"],
        is_deleted=row["is_deleted"],
        status=EndpointStatus(row["status"]),
        progress=_progress(row["progress"]),
        failure=row["failure"],
        serving=_serving(row["serving"]),
        autoscale=_autoscale(row["autoscale"]),
        rollout=rollout_of(row["rollout"]),
        pool=row["pool"],
        host_id=row["host_id"],
    )


def release_of(row: sa.RowMapping) -> Release:
    """Return the release of a row."""
    return Release(row["model_id"], row["weight"], row["shadow"], row["fallback"])


def replica_values(replica: Replica) -> Values:
    """Return the row of a replica."""
    return {
        "replica_id": replica.id,
        "endpoint_id": replica.endpoint_id,
        "model_id": replica.version_id,
        "ordinal": replica.ordinal,
        "generation": replica.generation,
        "state": replica.state.value,
        "state_since": replica.state_since,
        "host": replica.host,
        "port": replica.port,
        "secret": replica.secret,
        "slots": replica.slots,
        "started_at": replica.started_at,
        "ready_at": replica.ready_at,
        "reason": replica.reason,
        "placement": _json(replica.placement),
        "model_name": replica.model_name,
        "guests": seats_text(replica.guests),
        "takes_over": replica.takes_over,
    }


def replica_of(row: sa.RowMapping) -> Replica:
    """Return the replica of a row."""
    return Replica(
        id=row["replica_id"],
        endpoint_id=row["endpoint_id"],
        version_id=row["model_id"],
        ordinal=row["ordinal"],
        generation=row["generation"],
        state=ReplicaState(row["state"]),
        state_since=row["state_since"],
        host=row["host"],
        port=row["port"],
        secret=row["secret"],
        slots=row["slots"],
        started_at=row["started_at"],
        ready_at=row["ready_at"],
        reason=row["reason"],
        placement=_placement(row["placement"]),
        model_name=row["model_name"],
        guests=_seats(row["guests"]),
        takes_over=row["takes_over"],
    )


def seats_text(guests: tuple[GuestSeat, ...]) -> str:
    """Return what the row of a replica says of its guests."""
    return _json(guests)


def event_values(event: Event) -> Values:
    """Return the row of an event."""
    return {
        "endpoint_id": event.endpoint_id,
        "at": event.at,
        "kind": event.kind,
        "reason": event.reason,
        "replica_id": event.replica_id,
        "data": _json(event.data),
    }


def event_of(row: sa.RowMapping) -> Event:
    """Return the event of a row."""
    return Event(
        at=row["at"],
        endpoint_id=row["endpoint_id"],
        kind=row["kind"],
        reason=row["reason"],
        replica_id=row["replica_id"],
        data=_event_data(row["data"]),
    )


def usage_of(row: sa.RowMapping) -> UsageRow:
    """Return the ledger row of a row."""
    return UsageRow(
        request_id=row["request_id"],
        tenant_id=row["customer_id"],
        key_id=row["api_key_id"],
        endpoint_id=row["endpoint_id"],
        model=row["model_name"],
        version_id=row["model_id"],
        replica_id=row["replica_id"],
        route=row["route"],
        is_stream=row["is_stream"],
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        completion_tokens=row["completion_tokens"],
        cost_nanousd=row["cost_nanousd"],
        status=UsageStatus(row["status"]),
        http_status=row["http_status"],
        error_code=row["error_code"],
        ttft_ms=row["ttft_ms"],
        latency_ms=row["latency_ms"],
        attempts=row["attempts"],
        is_estimated=row["is_estimated"],
        created_at=row["created_at"],
        settled_at=row["settled_at"],
        units=row["units_micro"] / MICRO_PER_UNIT,
        unit=Unit(row["unit"]),
        reasoning_tokens=row["reasoning_tokens"],
        audio_input_tokens=row["audio_input_tokens"],
        audio_output_tokens=row["audio_output_tokens"],
        batch_id=row["batch_id"],
    )
