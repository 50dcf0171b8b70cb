"""Faults on demand: what to do wrong, for which request (the package docstring lists the directives)."""

import re
from typing import Annotated, Literal

import msgspec

Tokens = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request shall suffer."""

    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slow: Milliseconds | None = None
    ttft: Milliseconds | None = None
    crash_after: Tokens | None = None
    crash_before_first: bool = False
    crash_always: bool = False
    crash_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    hang_after: Tokens | None = None
    hang_before_first: bool = False
    stall_after: Tokens | None = None
    cut_after: Tokens | None = None
    clean_end_after: Tokens | None = None
    error_after: Tokens | None = None
    error_form: Literal["wrapped", "event", "flat"] = "wrapped"
    http_error: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    garbage: Literal["invalid_json", "error_200", "content_type"] | None = None
    huge_line: Annotated[int, msgspec.Meta(ge=1)] | None = None
    no_usage: bool = False
    null_usage: bool = False
    reasoning: Tokens = 0
    sound: Tokens = 0
    missing_role: bool = False
    no_finish: bool = False
    no_done: bool = False
    usage_every_chunk: bool = False
    ping: bool = False
    early_headers: bool = False
    split_bytes: bool = False
    crlf: bool = False
    byte_tokens: bool = False

    def for_continued(self) -> "Faults":
        """Return what is left of them when an answer is continued that another engine began.

        What the first attempt suffered must not hit the second too, else no failover could be seen to work; only
        ``crash_always`` does.
        """
        crash_after = self.crash_after if self.crash_always else None
        return msgspec.structs.replace(
            self,
            crash_after=crash_after,
            crash_before_first=False,
            hang_after=None,
            hang_before_first=False,
            stall_after=None,
            cut_after=None,
            clean_end_after=None,
            error_after=None,
            http_error=None,
            garbage=None,
        )


class Planned(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of ``POST /sim/faults``."""

    directive: str = ""
    times: Annotated[int, msgspec.Meta(ge=0)] = 1
    contains: str = ""
    health_status: Annotated[int, msgspec.Meta(ge=100, le=599)] | None = None
    health_ms: Milliseconds | None = None
    stalled: bool = False


_DIRECTIVE = re.compile(r"\s?\[\[sim:([^\]]*)\]\]")


def cut_directives(text: str) -> tuple[str, str]:
    """Return ``text`` without directives, and what stood in them."""
    found = " ".join(match[1] for match in _DIRECTIVE.finditer(text))
    return (_DIRECTIVE.sub("", text).strip(), found) if found else (text, "")


def read_directive(directive: str) -> Faults:
    """Return the faults of ``key=value key …``.

    Raises:
        ValueError: an unknown key or a bad value; a test with a typo must not pass for the wrong reason.
    """
    wanted: dict[str, str | bool] = {}
    for word in directive.replace(",", " ").split():
        key, sign, value = word.partition("=")
        wanted[key] = value if sign else True
    try:
        return msgspec.convert(wanted, Faults, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"[[sim: {directive}]]: {error}") from error


class FaultPlan:
    """The faults planned over ``POST /sim/faults``; each is used up by the requests that it meets."""

    __slots__ = ("_planned", "health_ms", "health_status", "is_stalled")

    def __init__(self) -> None:
        self._planned: list[Planned] = []
        self.health_status = 200
        self.health_ms = 0.0
        self.is_stalled = False

    def replace(self, planned: list[Planned]) -> None:
        """Forget what was planned and plan this.

        Raises:
            ValueError: a directive that is none.
        """
        for entry in planned:
            read_directive(entry.directive)
        self.health_status = next((e.health_status for e in planned if e.health_status is not None), 200)
        self.health_ms = next((e.health_ms for e in planned if e.health_ms is not None), 0.0)
        self.is_stalled = any(entry.stalled for entry in planned)
        self._planned = [entry for entry in planned if entry.directive]

    def listed(self) -> list[Planned]:
        """Return what is still to come."""
        return list(self._planned)

    def for_request(self, prompt: str, directive: str) -> Faults:
        """Return the faults of a request: its own directive and the first planned entry that it meets.

        Raises:
            ValueError: a directive that is none.
        """
        for entry in self._planned:
            if entry.contains in prompt:
                directive = f"{entry.directive} {directive}"
                if entry.times == 1:
                    self._planned.remove(entry)
                elif entry.times > 1:
                    entry.times -= 1
                break
        return read_directive(directive)
