"""Reading and filling RabbitMQ queues, against what one would write by hand with the same libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness import Case, Goal, Scenario
from benchmarks.process import BATCH, PUBLISHERS, Here, body, run_job
from benchmarks.rabbit_process import GROUP
from benchmarks.rabbit_queue import NOTE, PREFETCH, server

__all__ = ["scenario"]

PIKA = "aio-pika, an ack each"
GROUPED = f"aiormq, an ack for {GROUP}"
PEER = "FastStream, AckPolicy.ACK"
SENDS = f"aiormq, publishes by {PUBLISHERS} tasks"
PEER_SENDS = f"FastStream, publishes by {PUBLISHERS} tasks"
TRANSPORTS = {"aiormq": ("library channel", 20_000, 0.35), "fast": ("fast lane", 40_000, 0.08)}


def scenario(loop: str) -> Scenario:
    """The scenario on one loop."""
    facts = {"messages": f"at most {len(body(9_999, NOTE))} bytes"}

    @contextmanager
    def cases() -> Iterator[Sequence[Case]]:
        with server() as (node, pid, version):
            facts["RabbitMQ"] = version
            yield _Bench(Here(str(node), pid), loop).cases()

    return Scenario(
        name="rabbit",
        title="Reading and filling RabbitMQ queues",
        about=(
            "One RabbitMQ node; persistent messages of 150 bytes of JSON in a quorum queue as an app declares it, the "
            f"same for all, with a prefetch of {PREFETCH:,}. It is filled before each run with what that run reads; "
            "each run is a process of its own. Reading, a window begins with the consumer, and ends when the queue is "
            "empty with nothing unacknowledged, as its leader says. Publishing, all is persistent, mandatory and "
            "confirmed, to a quorum queue by its name. CPU us is the reading (or publishing) process, server CPU the "
            "node, a message; `client` compares the former. The app uses two transports: the library channel is "
            "aiormq's connection with our own channel on it, the fast lane takes what is many past the library."
        ),
        cases=cases,
        facts=facts,
    )


@dataclass(frozen=True)
class _Bench:
    here: Here
    loop: str

    def cases(self) -> list[Case]:
        found = [
            self._case(PIKA, "pika-each", 8_000),
            self._case("aiormq, an ack each", "each", 10_000, [Goal(measure="client", reference=PIKA)]),
            self._case(GROUPED, "groups", 15_000, [Goal(measure="client", reference=PIKA)]),
            self._case(PEER, "peer", 3_000, [Goal(measure="client", reference=PIKA)]),
        ]
        for transport in TRANSPORTS:
            found += self._reading(transport)
        shown = [Goal(measure="client", reference=SENDS)]
        found += [
            self._case(SENDS, "sends", 10_000),
            self._case(f"aio-pika, publishes by {PUBLISHERS} tasks", "pika-sends", 8_000, shown),
            self._case(PEER_SENDS, "peer-sends", 5_000, shown),
        ]
        return [*found, *map(self._publishing, TRANSPORTS)]

    def _reading(self, transport: str) -> Iterator[Case]:
        name, count, at_most = TRANSPORTS[transport]
        goal = Goal(measure="client", reference=PIKA, at_most=at_most)
        beside = [
            Goal(measure="cpu", reference=PIKA),
            Goal(measure="client", reference=PEER),
            Goal(measure="client", reference=GROUPED),
        ]
        yield self._case(f"app, {name}, workers=1", f"{transport}-one", count, [goal, *beside])
        yield self._case(f"app, {name}, workers=8", f"{transport}-eight", count, [goal, *beside])
        shown = Goal(measure="client", reference=PIKA)
        yield self._case(f"app, {name}, batches of {BATCH}", f"{transport}-batches", count, [shown])

    def _publishing(self, transport: str) -> Case:
        goals = [
            Goal(measure="client", reference=SENDS, at_most=0.2),
            Goal(measure="speed", reference=SENDS),
            Goal(measure="client", reference=PEER_SENDS),
        ]
        name = f"app, {TRANSPORTS[transport][0]}, publishes by {PUBLISHERS} tasks"
        return self._case(name, f"{transport}-sends", 20_000, goals)

    def _case(self, name: str, job: str, count: int, goals: Sequence[Goal] = ()) -> Case:
        return Case(
            name=name,
            count=count,
            run=lambda n: run_job("benchmarks.rabbit_process", self.loop, job, n, self.here),
            goals=goals,
        )
