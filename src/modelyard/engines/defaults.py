"""What most engines say to the rarer questions of the contract: no guests, no sleep, every route."""

from pathlib import Path

from modelyard.domain.facts import ModelFacts
from modelyard.engines import EngineCall, Guest, GuestKind, Options


class EngineDefaults:
    """Base of an engine that overrides what it can do more."""

    name: str
    routes: frozenset[str]
    request_extras: frozenset[str] = frozenset()
    needs_artifact = True
    computes_on_gpus = False
    is_remote = False
    guests = GuestKind.NONE
    guests_option = ""
    ready_path = "/health"
    load_path = "/metrics"

    def missing(self) -> str:
        """Return "": it needs nothing that the platform itself does not need."""
        return ""

    def check_artifact(self, file: Path) -> None:
        """Accept anything."""

    def routes_for(self, options: Options) -> frozenset[str]:
        """Return all routes, whatever the options."""
        return self.routes

    def routes_of(self, options: Options, facts: ModelFacts) -> frozenset[str]:
        """Return all that the options leave, whatever the model."""
        return self.routes_for(options)

    def extras_of(self, facts: ModelFacts) -> frozenset[str]:
        """Return all extras, and that a tool is called where one must be."""
        return self.request_extras | {"tools.required"}

    def sleeps_after_s(self, options: Options) -> float:
        """Return 0: it never sleeps by itself."""
        return 0.0

    def guests_max(self, options: Options) -> int:
        """Return 0: it takes none in."""
        return 0

    def load_guest(self, guest: Guest) -> EngineCall:
        """Refuse: nobody asks an engine without guests."""
        raise NotImplementedError(f"the engine '{self.name}' takes no guests in")

    def unload_guest(self, name: str) -> EngineCall:
        """Refuse: nobody asks an engine without guests."""
        raise NotImplementedError(f"the engine '{self.name}' takes no guests in")

    def read_guests(self, models: str) -> frozenset[str]:
        """Return nothing: there are none."""
        return frozenset()

    def sleep(self, options: Options) -> EngineCall | None:
        """Return None: it cannot be told to."""
        return None

    def wake(self, options: Options) -> EngineCall | None:
        """Return None: it is always awake."""
        return None
