"""``modelyard deploy --dry-run``: what a deployment would need, where it would run and what it would cost."""

from modelyard.cli.exits import Refused
from modelyard.cli.http import Platform
from modelyard.cli.output import Item, show_json, show_pairs, show_table
from modelyard.cli.sending import without_upload

GIB = 1024**3


def show_plan(platform: Platform, body: Item, *, is_json: bool) -> None:
    """Ask the platform for the plan of a deploy request, and print it."""
    try:
        plan = platform.post("/v1/models/plan", body)
    except Refused as error:
        raise without_upload(error) from error
    if is_json:
        show_json({"request": body, **plan})
        return
    memory = plan["memory"]
    needs = f"{_gib(memory['replica_bytes'])} a replica, of which weights {_gib(memory['weights_bytes'])}"
    if memory["kv_tokens"]:
        needs += f"; the KV cache holds {memory['kv_tokens']:,} tokens"
    if plan["host"]:
        _show_guest(plan)
        return
    show_pairs(
        {
            "Model": f"{plan['model_name']} {plan['version']} on {plan['framework']}",
            "Replicas": f"{0 if plan['scale_to_zero'] else plan['min_replicas']}..{plan['max_replicas']}",
            "Accelerators": f"{plan['gpus_per_replica']} x {plan['gpu_type']} a replica",
            "Why these": plan["hardware_reason"],
            "Memory": needs,
            "Fits": f"{'yes' if plan['fits'] else 'no'}{': ' if plan['reason'] else ''}{plan['reason']}",
            "Cost": f"${plan['cost_per_hour_usd']:g} to ${plan['max_cost_per_hour_usd']:g} an hour",
            "Ready in": f"about {plan['estimated_ready_seconds']} s",
        }
    )
    if plan["replicas"]:
        rows = [
            (
                str(at),
                place["node"],
                ", ".join(map(str, place["accelerators"])),
                _gib(place["memory_bytes"]),
                "yes" if place["is_cached"] else "no",
            )
            for at, place in enumerate(plan["replicas"])
        ]
        print()
        show_table(("REPLICA", "NODE", "ACCELERATORS", "MEMORY EACH", "WEIGHTS THERE"), rows)


def _show_guest(plan: Item) -> None:
    """Print what a guest takes: a seat, and of the memory that its host keeps for guests."""
    show_pairs(
        {
            "Model": f"{plan['model_name']} {plan['version']} on {plan['framework']}",
            "Sits on": f"the replicas of '{plan['host']}', beside others; it has none of its own",
            "Memory": f"weights of {_gib(plan['memory']['weights_bytes'])}, of what '{plan['host']}' keeps for guests",
            "Fits": "yes",
            "Cost": "$0 an hour beside its host",
            "Ready in": f"about {plan['estimated_ready_seconds']} s",
        }
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
