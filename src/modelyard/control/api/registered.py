"""Versions that exist, by name: ``model:NAME@VERSION`` to deploy one, ``NAME@VERSION`` as the base of an adapter."""

import difflib
from collections.abc import Iterable

from modelyard.control.api.faults import Fault
from modelyard.control.context import Context
from modelyard.domain.catalog import ModelVersion
from modelyard.domain.tenants import Identity
from modelyard.engines import Engine, GuestKind

MODEL = "model:"
"""How an order names a registered version in the place of an artifact."""

_REFERENCE_LENGTH_MAX = 300
_TOLD_MAX = 5


def reference_of(version: ModelVersion) -> str:
    """Return ``NAME@VERSION``."""
    return f"{version.name}@{version.version}"


def age_of(version: ModelVersion) -> tuple[int, int, str]:
    """Return what sorts versions of a name by age; of one second, ``v10`` comes after ``v9``."""
    return version.created_at, len(version.version), version.version


def newest(versions: Iterable[ModelVersion], name: str, *, tenant_id: str) -> ModelVersion | None:
    """Return the newest version of a tenant's model."""
    mine = [one for one in versions if one.name == name and one.tenant_id == tenant_id]
    return max(mine, key=age_of, default=None)


async def find_registered(
    context: Context, identity: Identity, reference: str
) -> tuple[ModelVersion | None, list[Fault]]:
    """Return the version of the caller's tenant that ``model:NAME@VERSION`` (or ``model:NAME``: the newest) names."""
    wanted = reference.removeprefix(MODEL)[:_REFERENCE_LENGTH_MAX]
    versions = await context.store.versions(tenant_id=identity.tenant_id)
    name, at, _ = wanted.partition("@")
    if not at:
        found = newest(versions, name, tenant_id=identity.tenant_id)
    else:
        found = next((one for one in versions if reference_of(one) == wanted), None)
    if found is not None:
        return found, []
    of_name = sorted((one for one in versions if one.name == name), key=age_of, reverse=True)
    has = ", ".join(f"'{one.version}'" for one in of_name[:_TOLD_MAX])
    has += f" and {len(of_name) - _TOLD_MAX} more" if len(of_name) > _TOLD_MAX else ""
    hint = f"'{name[:100]}' has {has}" if has else "see 'modelyard models versions', or register it first"
    return None, [Fault("model_artifact", f"there is no registered version '{wanted[:200]}'; {hint}")]


def no_adapters(engine: Engine) -> str:
    """Return why an adapter cannot be deployed on ``engine``."""
    return f"the engine '{engine.name}' cannot load an adapter onto a base; merge them into one artifact"


async def find_base(
    context: Context, identity: Identity, engine: Engine | None, reference: str, *, is_deployed: bool
) -> tuple[ModelVersion | None, list[Fault]]:
    """Return the version that an adapter is for, and what is wrong with it.

    The tenant's own comes first, then what a shared endpoint has; an adapter is no base, so one that is called like a
    shared base does not hide it.
    """
    if not reference:
        return None, []
    shared = {
        release.version_id
        for endpoint in await context.store.endpoints()
        if endpoint.is_shared and not endpoint.is_deleted
        for release in endpoint.releases
    }
    versions = await context.store.versions()
    seen = [one for one in versions if one.tenant_id == identity.tenant_id or one.id in shared]
    named = [one for one in seen if reference_of(one) == reference]
    able = [one for one in named if not one.base_id]
    if not able:
        bases = [one for one in seen if not one.base_id and _takes_adapters(context, one)]
        return None, [Fault("base", _no_base(reference, bases, is_adapter=bool(named)))]
    base = max(able, key=lambda one: one.tenant_id == identity.tenant_id)
    faults = []
    if engine is not None and base.framework != engine.name:
        faults.append(Fault("base", f"'{reference}' runs on '{base.framework}', and this on '{engine.name}'"))
    if is_deployed and engine is not None and engine.guests is not GuestKind.ADAPTER:
        faults.append(Fault("base", no_adapters(engine)))
    return base, faults


def _takes_adapters(context: Context, version: ModelVersion) -> bool:
    engine = context.engines.get(version.framework)
    return engine is not None and engine.guests is GuestKind.ADAPTER


def _no_base(reference: str, bases: Iterable[ModelVersion], *, is_adapter: bool) -> str:
    """Return why ``reference`` is no base, and which of ``bases`` may be meant: the nearest by name, or all."""
    names = list(dict.fromkeys(reference_of(one) for one in sorted(bases, key=age_of, reverse=True)))
    wanted = reference[:_REFERENCE_LENGTH_MAX]
    close = difflib.get_close_matches(wanted, names, n=1)
    if not close and "@" not in wanted:
        close = [one for one in names if one.partition("@")[0] == wanted][:1]
    what = f"there is no version '{reference[:200]}' of yours, nor a shared one"
    if is_adapter:
        what = f"'{reference[:200]}' is an adapter itself; name the version that it is loaded onto"
    elif close:
        return f"{what}; did you mean '{close[0]}'?"
    elif "@" not in reference:
        what += "; write NAME@VERSION"
    if not names:
        return what
    told = ", ".join(f"'{one}'" for one in names[:_TOLD_MAX])
    return f"{what}; there is {told}" + (f" and {len(names) - _TOLD_MAX} more" if len(names) > _TOLD_MAX else "")
