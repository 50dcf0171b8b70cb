"""``modelyard deploy -f``: make an endpoint be as its file says; the same file twice changes nothing."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from modelyard.cli.exits import Exit, Failure, Refused
from modelyard.cli.http import PAGE, Platform, segment
from modelyard.cli.output import Item
from modelyard.cli.sending import send_order
from modelyard.cli.uploading import digest_of, manifest_of
from modelyard.domain.endpoints import Autoscale

DEFAULT_RULES: Item = msgspec.structs.asdict(Autoscale())
"""What 'autoscale' is where a file does not say."""
_TIMEOUTS = ("connect_s", "first_token_s", "token_s", "total_s")


class Applied(NamedTuple):
    """What was done: the endpoint's id, and the changes in words, none for an endpoint that was so already."""

    endpoint_id: str
    changes: list[str]
    answer: Item


def apply(platform: Platform, order: Item, file: Path | None, *, is_uploading: bool) -> Applied:
    """Deploy ``order``, or bring the endpoint of its name to it; ``file`` is its artifact on this machine.

    Raises:
        Failure: something of it cannot be changed.
    """
    endpoint = _mine(platform, order["model_name"])
    if endpoint is None:
        answer = send_order(
            platform, order, file, lambda body: platform.post("/v1/models/deploy", body), is_uploading=is_uploading
        )
        return Applied(answer["endpoint_id"], ["deployed"], answer)
    if bool(order.get("shared")) != endpoint["is_shared"]:
        raise Failure(f"'shared' of an endpoint never changes. Remove '{endpoint['name']}' and apply the file again.")
    path, changes = f"/v1/endpoints/{segment(endpoint['id'])}", []
    # The size first: a release that is new may need the room.
    if body := change_of(endpoint, order):
        endpoint = platform.patch(path, body)
        changes.append(f"changed {', '.join(sorted(body))}")
    version = platform.get(f"/v1/registry/models/{segment(_main(endpoint))}")
    if _is_other(platform, order, file, version):
        body = _release_of(order, version)
        endpoint = send_order(
            platform, body, file, lambda body: platform.post(f"{path}/releases", body), is_uploading=is_uploading
        )
        changes.append(f"added {endpoint['releases'][-1]['version']} with all of the traffic")
    return Applied(endpoint["id"], changes, endpoint)


def change_of(endpoint: Item, order: Item) -> Item:
    """Return the body of the PATCH that brings an endpoint to its file; what the file leaves out is the default."""
    hardware, scaling = order.get("hardware", {}), order.get("scaling", {})
    least = hardware.get("min_replicas", 1)
    most = hardware.get("max_replicas")
    wanted: dict[str, Item] = {
        "hardware": {"min_replicas": least, "max_replicas": max(1, least) if most is None else most},
        "scaling": {
            "scale_to_zero": scaling.get("scale_to_zero", False),
            "scale_to_zero_after_idle_seconds": scaling.get("scale_to_zero_after_idle_seconds", 300.0),
        },
    }
    body: Item = {}
    for part, fields in wanted.items():
        if different := {name: value for name, value in fields.items() if endpoint[name] != value}:
            body[part] = different
    # As a deployment has it: an idle time that is named is fixed, unless the file says otherwise.
    named = {"idle": "fixed"} if "scale_to_zero_after_idle_seconds" in scaling else {}
    rules = DEFAULT_RULES | named | order.get("autoscale", {})
    has = endpoint["autoscale"]
    is_idle_changed = "scale_to_zero_after_idle_seconds" in body.get("scaling", {})
    if autoscale := {
        name: value
        for name, value in rules.items()
        if name in has and (has[name] != value or (name == "idle" and is_idle_changed))
    }:
        body["autoscale"] = autoscale
    if serving := _serving_change(endpoint["serving"], order.get("serving", {})):
        body["serving"] = serving
    return body


def _serving_change(has: Item, wanted: Item) -> Item:
    change: Item = {}
    for name, default in (("coalesce_ms", 0), ("sticky", "none"), ("fallback_after_s", 0.0)):
        if has.get(name, default) != (value := wanted.get(name, default)):
            change[name] = value
    timeouts = {name: wanted.get("timeouts", {}).get(name) for name in _TIMEOUTS}
    if different := {name: value for name, value in timeouts.items() if has["timeouts"].get(name) != value}:
        change["timeouts"] = different
    return change


def _mine(platform: Platform, name: str) -> Item | None:
    """Return the endpoint of this name that belongs to the key's own tenant: an admin sees those of others too."""
    tenant_id = _tenant_of(platform)
    found: list[Item] = [
        one
        for one in platform.all("/v1/endpoints", limit=PAGE)
        if one["name"] == name and one["owner_id"] == tenant_id and not one["is_deleted"]
    ]
    return found[0] if found else None


def _tenant_of(platform: Platform) -> str:
    key_id = platform.key.split("_")[1] if platform.key.count("_") >= 2 else ""
    try:
        return str(platform.get(f"/v1/keys/{segment(key_id)}")["tenant_id"])
    except Refused as error:
        if error.exit_code is not Exit.NOT_FOUND:
            raise
        raise Failure("The platform does not know this key. Check --key.", Exit.AUTH) from error


def _main(endpoint: Item) -> str:
    """Return the version that answers most requests."""
    return str(max(endpoint["releases"], key=lambda release: release["weight"])["model_id"])


def _is_other(platform: Platform, order: Item, file: Path | None, version: Item) -> bool:
    """Say whether the order is for another version than ``version``."""
    artifact = order.get("model_artifact", "")
    if artifact.startswith("model:"):
        return bool(platform.get(f"/v1/registry/models/{segment(artifact[6:])}")["id"] != version["id"])
    hardware = order.get("hardware", {})
    has = version["gpu_requirement"]  # what the file leaves out was chosen for it, and is not another now
    if (hardware.get("gpu_type", has["type"]), hardware.get("gpu_count", has["count"])) != (has["type"], has["count"]):
        raise Failure("Accelerators of an endpoint never change. Remove it and apply the file again.")
    is_same = (
        # An adapter has the engine of its base, whether its order says so or not.
        (order.get("framework") or version["framework"]) == version["framework"]
        and order.get("options", {}) == version["config"]
        and order.get("base", "") == version["base"]
        and _is_same_content(artifact, file, version)
    )
    wanted = order.get("version")
    if not is_same and wanted == version["version"]:
        raise Failure(f"Version '{wanted}' exists and is another, and versions never change. Give it a new 'version'.")
    return not is_same or bool(wanted not in (None, version["version"]))


def _is_same_content(artifact: str, file: Path | None, version: Item) -> bool:
    if file is None or not version["artifact_digest"]:
        return bool(artifact == version["artifact_path"])
    if file.is_dir():
        return manifest_of(file) == str(version["artifact_digest"])
    if file.stat().st_size != version["artifact_size"]:
        return False
    return bool(digest_of(file, version["artifact_size"]) == version["artifact_digest"])


def _release_of(order: Item, version: Item) -> Item:
    names = ("framework", "model_artifact", "version", "options", "base")
    body = {name: order[name] for name in names if name in order}
    if body.get("version") == version["version"]:
        del body["version"]
    return body | {"weight": 100}
