"""What is on the engines of a simulated world: what comes to them, is looked at, taken off, or lost with them."""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from modelyard.policy.breaker import Failure
from modelyard.sim.events import Events
from modelyard.sim.gateway import Front, Marks
from modelyard.sim.requests import Request
from modelyard.sim.tasks import Aside, Task

if TYPE_CHECKING:
    from modelyard.sim.world import Replica


class OnEngines:
    """That part of a world; who is a world has all of these."""

    events: Events
    replicas: "dict[str, Replica]"
    fronts: list[Front]
    tasks: dict[Hashable, Task]
    growing: dict[Request, Marks]
    started: int
    asides: int

    def schedule(self, replica: "Replica") -> None:
        """Let an engine go on when it is time."""
        raise NotImplementedError

    def stop(self, request: Request) -> None:
        """Take a request off its engine, which drops it at the end of its iteration; it is to begin anew."""
        self.growing.pop(request, None)
        task = self.tasks.pop(request)
        replica = self.replicas[task.replica_id]
        if replica.works:
            replica.engine.abort(task, self.events.now_s)
            self.schedule(replica)

    def on(self, replica_id: str) -> list[Request]:
        """Return the requests that are on a replica's engine."""
        there = [task.what for task in self.tasks.values() if task.replica_id == replica_id]
        return [what for what in there if isinstance(what, Request)]

    def youngest(self, gateway: int) -> Iterator[Request]:
        """Yield a gateway's requests that are on engines, the last to come first."""
        there = [what for what in self.tasks if isinstance(what, Request) and what.gateway == gateway]
        yield from sorted(there, key=lambda one: (-one.arrival.at_s, -one.number))

    def tokens(self, request: Request) -> int:
        """Return how many tokens its engine has generated for a request."""
        return self.generated(self.tasks[request])

    def ask(self, replica_id: str, prompt_tokens: int, output_tokens: int, aside: Aside) -> None:
        """Ask an engine something that answers no client."""
        replica = self.replicas.get(replica_id)
        if replica is None or replica.is_down:
            self.events.after(0.0, lambda: aside.ended(Failure.UNREACHABLE))
            return
        self.asides += 1
        self.submit(replica, aside, prompt_tokens=prompt_tokens, output_tokens=output_tokens, blocks=(), band=0)

    def submit(
        self,
        replica: "Replica",
        what: Request | Aside,
        *,
        prompt_tokens: int,
        output_tokens: int,
        blocks: tuple[int, ...],
        band: int,
    ) -> None:
        """Give an engine something to do; one that does not work keeps it as it is."""
        now_s = self.events.now_s
        task = Task(
            what,
            number=self.started,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            blocks=blocks,
            band=band,
            replica_id=replica.id,
        )
        self.started += 1
        self.tasks[what] = task
        task.come_s = now_s
        if replica.works:
            replica.engine.submit(task, now_s)
            self.schedule(replica)

    def drop(self, task: Task, tokens: int) -> None:
        """Forget what was on an engine that is gone, or given up: its caller has ``tokens`` of it."""
        request = task.what
        del self.tasks[request]
        if isinstance(request, Request) and request.arrival.is_stream:
            request.told += tokens
            if (marks := self.growing.get(request)) is not None:
                for length in marks.passed(request.told, self.events.now_s):
                    self.fronts[request.gateway].grew(request, length)

    def generated(self, task: Task) -> int:
        """Return how many tokens there are by now of what is on an engine."""
        replica = self.replicas[task.replica_id]
        return replica.engine.generated_by(task, min(self.events.now_s, replica.hung_s))
