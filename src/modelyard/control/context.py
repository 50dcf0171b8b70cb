"""What the parts of the controller share.

One ``Context`` is built in ``control/app.py``; the management API and the
console get it whole, so that a new route needs no new wiring. The callables
are the only ways from a route into the loops.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from modelyard.clock import Clock
from modelyard.config import Config, DataDirectory
from modelyard.control.artifacts import ArtifactStore
from modelyard.control.billing import BillingDesk
from modelyard.control.books import Books
from modelyard.control.files import FileDesk
from modelyard.control.requests import RequestDesk
from modelyard.control.terms import TermsDesk
from modelyard.control.uploads import UploadDesk
from modelyard.control.webhooks import WebhookSender
from modelyard.domain.demand import Report
from modelyard.domain.nodes import NodeSeen
from modelyard.domain.routing_table import Heartbeat
from modelyard.domain.why import RequestStory
from modelyard.engines import Engines
from modelyard.fleet import Fleet
from modelyard.observe.rounds import RoundStatus, RoundTimes
from modelyard.policy import scaling
from modelyard.policy.forecast import Profile
from modelyard.policy.signals import Signals
from modelyard.stores import BatchStore, BillingStore, ControlStore, EventStore, UsageStore


@dataclass(slots=True)
class Context:
    """Everything that a management route may use."""

    config: Config
    data: DataDirectory
    store: ControlStore
    usage: UsageStore
    books: Books
    """Sinks of usage, replicas' hours."""
    requests: RequestDesk
    """Requests whose answer is kept."""
    events: EventStore
    """What happens to tenants, for their webhooks; ``webhooks.wake()`` sends it at once."""
    webhooks: WebhookSender
    uploads: UploadDesk
    """Artifacts that clients send."""
    batches: BatchStore
    files: FileDesk
    """Files of tenants."""
    fleet: Fleet
    engines: Engines
    artifacts: ArtifactStore
    clock: Clock
    pepper: bytes
    internal_token: str
    wake: Callable[[], None]
    """Start a reconcile pass now."""
    refresh: Callable[[], Awaitable[None]]
    """Build and publish a new routing table; when it returns, connected gateways have been sent the change."""
    health: Callable[[], Heartbeat]
    """Whether the store answers, as the gateways are told."""
    billing: BillingStore
    """Prices, accounts, credit, budgets, invoices."""
    terms: TermsDesk
    """What gateways are told of these."""
    billing_desk: BillingDesk
    gateways: Callable[[], dict[str, Report]]
    """The last report of each connected gateway by its id."""
    signals: Signals
    """What gateways counted of releases and endpoints lately."""
    recall: Callable[[str], Awaitable[RequestStory | None]]
    """What the gateways remember of a request, by its id."""
    size: Callable[[str], tuple[scaling.Seen, scaling.Decision] | None] = lambda _: None
    """What the last pass saw of an endpoint, and which size it decided."""
    nodes: Callable[[], Mapping[str, NodeSeen]] = dict
    """The fleet's nodes by id, as the last round saw them."""
    forecast: Callable[[str], Profile | None] = lambda _: None
    """What is known of when requests of an endpoint come."""
    rounds: Callable[[], RoundStatus] = field(default_factory=lambda: lambda: RoundTimes().status(0.0))
    """How long reconcile rounds take."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from reading an endpoint to storing what became of it, so that two changes at once both happen."""
