"""What ``modelyard bench`` prints for people."""

from collections.abc import Callable

from modelyard.cli.output import Item, clean, remark, show_pairs, show_table


def show_run(result: Item) -> None:
    """Print the loads of a run, one a line, and what to doubt of them."""
    levels: list[Item] = result["levels"]
    workload = result["workload"]
    show_pairs({"Model": f"{result['model']} at {result['url']}", "Asked": f"{workload['title']}, {workload['route']}"})
    if levels:
        print()
        has_output = workload["route"] != "embeddings"
        columns = {name: cell for name, cell in _COLUMNS.items() if has_output or name not in _OF_OUTPUT}
        show_table(list(columns), [[cell(level) for cell in columns.values()] for level in levels])
        print()
        _show_latencies(levels)
    for level in levels:
        for error, count in level["errors"].items():
            detail = level["error_details"].get(error, "")
            remark(clean(f"{level['level']}: {count} x {error}{': ' if detail else ''}{detail}"))
        for warning in level["warnings"]:
            remark(f"{level['level']}: {warning}.")


_COLUMNS: dict[str, Callable[[Item], object]] = {
    "LOAD": lambda level: level["level"],
    "DONE": lambda level: level["completed"],
    "FAILED": lambda level: level["failed"],
    "REQ/S": lambda level: _number(_best(level)["request_throughput"]),
    "OUT TOK/S": lambda level: _number(_best(level)["output_throughput"]),
    "TOTAL TOK/S": lambda level: _number(level["total_token_throughput"]),
    "IN": lambda level: level["total_input_tokens"],
    "OUT": lambda level: level["total_output_tokens"],
    "CLIENT CPU": lambda level: f"{level['client']['cpu_share']:.0%}",
}


_OF_OUTPUT = ("OUT TOK/S", "OUT")


def _best(level: Item) -> Item:
    """Return the steady part of a run, without which the whole."""
    return level["steady"] or level


def _show_latencies(levels: list[Item]) -> None:
    rows = [
        [level["level"], title, *(_number(level[f"{one}_{name}_ms"]) for one in _FIGURES), level[f"samples_{name}"]]
        for name, title in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2el", "E2E"))
        for level in levels
        if f"mean_{name}_ms" in level
    ]
    if rows:
        show_table(["LOAD", "MS", "MEAN", "P50", "P90", "P95", "P99", "SAMPLES"], rows)


_FIGURES = ("mean", "p50", "p90", "p95", "p99")


def show_comparison(rows: list[Item]) -> None:
    """Print ratios, and where chance may be all of them."""
    columns: dict[str, Callable[[Item], object]] = {
        "LOAD": lambda row: row["level"],
        "FIGURE": lambda row: row["title"],
        "FIRST": lambda row: _number(row["first"]),
        "SECOND": lambda row: _number(row["second"]),
        "RATIO": lambda row: f"{row['ratio']:.2f}",
        "": _verdict,
    }
    show_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def _verdict(row: Item) -> str:
    has_doubt = row["overlaps"] is None and row["figure"].endswith("_ms")  # no interval could be given
    if row["is_enough"] is False or (has_doubt and not row["is_enough"]):
        return "too few to tell"
    if row["verdict"] == "same":
        return "same"
    return f"{row['verdict']}, within chance" if row["overlaps"] else str(row["verdict"])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
