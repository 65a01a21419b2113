"""A Kafka server that goes away under a running app: connections cut, the node frozen, restarted and killed, or one of
three lost, while one app publishes and handles messages through all of it, and is never started again.

    python -m tests.faults.kafka_cuts one|three FAULTS MESSAGES [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from streamfw import App, Message, OutcomeUnknown, PublishError, subscriber
from streamfw_kafka import KafkaBroker
from tests.brokers.kafka_cut import cut_everything
from tests.faults.findings import Pauses
from tests.faults.kafka_ledger import MemberLedger, read, recording
from tests.faults.kafka_reader import lag
from tests.faults.pace import Pace
from tests.faults.rebalance_oracle import Fate, Findings, judge
from tests.helpers import eventually
from tests.services.kafka import OwnKafka

__all__ = ["KafkaCutRun", "kafka_cut_run"]

PARTITIONS, KEYS = 6, 50
PUBLISHERS = 4
SESSION = 3.0
OPTIONS: dict[str, Any] = {
    "session_timeout": SESSION,
    "heartbeat": 0.3,
    "request_timeout": 3.0,
    "connect_timeout": 5.0,
    "publish_timeout": 5.0,
    "metadata_age": 2.0,
}
RED, GREEN = 20.0, 60.0  # seconds until health tells that the server is away, or all works again

Fault: TypeAlias = Callable[[], Awaitable[None]]


class Work(msgspec.Struct):
    id: int


@dataclass(slots=True)
class KafkaCutRun:
    findings: Findings
    faults: Counter[str]
    unknown: int
    refused: int
    unhealthy_seen: int
    recoveries: Pauses
    seconds: float

    def __str__(self) -> str:
        found = self.findings
        return (
            f"{dict(self.faults)} in {self.seconds:.0f} s; {found.handled} of {found.published} handled; "
            f"publishes refused {self.refused}, unknown {self.unknown}; repeated: {found.causes}; "
            f"health red {self.unhealthy_seen} times; at work again after {self.recoveries}; "
            f"partitions kept {found.kept}, new {found.new}, commits refused {dict(found.refused)}"
        )


async def kafka_cut_run(server: OwnKafka, directory: Path, *, seed: int, messages: int, faults: int) -> KafkaCutRun:
    """Publish `messages` while `faults` faults happen to a server of one node, or of three; end when everything is
    handled and committed, and the app is healthy."""
    began = time.monotonic()
    topic = await server.facts.create_topic(f"cuts-{secrets.token_hex(4)}", PARTITIONS)
    await server.facts.create_topic(f"{topic}.dead", 1)
    ledger, group = MemberLedger(directory / "app.log"), f"group-of-{topic}"

    @subscriber(topic, group=group, workers=8)
    async def handle(work: Work, message: Message) -> None:
        at = time.monotonic_ns()
        if work.id % 3 == 0:
            await asyncio.sleep(0.002)
        ledger.handled(at, {work.id: message})

    app = App(handle, name=group, brokers={"default": KafkaBroker(server.facts.url, **OPTIONS)}, drain_timeout=10)
    with recording(ledger):
        async with app.running():
            run = _Run(app, server, topic, directory, random.Random(seed), Pace(messages, faults))
            async with asyncio.TaskGroup() as both:
                both.create_task(run.publish(messages))
                both.create_task(run.harm(_plan(server.facts.nodes, faults, run)))
            await run.settled(group)
    findings = judge(read(directory), run.published, run.fates, session=SESSION, maybe=run.maybe, fifo=False)
    return KafkaCutRun(
        findings,
        run.faults,
        len(run.maybe),
        run.refused,
        run.unhealthy_seen,
        Pauses.of(run.recoveries),
        time.monotonic() - began,
    )


def _plan(nodes: int, faults: int, run: _Run) -> list[tuple[str, Fault]]:
    """So many of the faults that there are, in any order; a twentieth at least are SIGKILLs."""
    if nodes == 1:
        kinds: list[tuple[str, Fault]] = [
            *[("connections cut", run.cut)] * 6,
            ("server killed (SIGKILL)", run.kill),
            *[("connections cut", run.cut)] * 5,
            ("server restarted", run.restart),
            ("server frozen", run.freeze),
            *[("connections cut", run.cut)] * 3,
            ("server restarted", run.restart),
            ("server frozen", run.freeze),
            ("server frozen", run.freeze),
        ]
    else:
        kinds = [
            ("node killed (SIGKILL)", run.lose),
            ("connections cut", run.cut),
            ("node restarted", run.restart),
            ("node killed (SIGKILL)", run.lose),
            ("connections cut", run.cut),
            ("node frozen", run.freeze),
        ]
    step = max(1, len(kinds) // faults)
    plan = [kinds[number * step % len(kinds)] for number in range(faults)]
    run.chance.shuffle(plan)
    return plan


@dataclass(slots=True)
class _Run:
    app: App
    server: OwnKafka
    topic: str
    directory: Path
    chance: random.Random
    pace: Pace
    published: set[int] = field(default_factory=set)
    maybe: set[int] = field(default_factory=set)
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    fates: list[Fate] = field(default_factory=list)
    unhealthy_seen: int = 0
    recoveries: list[float] = field(default_factory=list)

    # -- what flows

    async def publish(self, messages: int) -> None:
        numbers = iter(range(messages))
        async with asyncio.TaskGroup() as publishers:
            for _ in range(PUBLISHERS):
                publishers.create_task(self._publish_some(numbers))

    async def _publish_some(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self.pace.turn(number)
            await self._publish_one(number)

    async def _publish_one(self, number: int) -> None:
        while True:
            try:
                await self.app.publish(self.topic, Work(number), key=str(number % KEYS))
            except OutcomeUnknown:
                self.maybe.add(number)
                return
            except PublishError:
                self.refused += 1  # it was surely not stored
                await asyncio.sleep(0.05)
                continue
            self.published.add(number)
            return

    # -- what happens

    async def harm(self, plan: Sequence[tuple[str, Fault]]) -> None:
        for name, fault in plan:
            await asyncio.sleep(self.chance.uniform(0.02, 0.4))
            began = time.monotonic_ns()
            await fault()
            self.fates.append(Fate(began, "server", until=time.monotonic_ns()))
            self.faults[name] += 1
            self.pace.fault_is_over()

    async def cut(self) -> None:
        """All connections of this process, as soon as it has any: the fault before may be a moment ago."""
        await eventually(cut_everything)

    async def freeze(self) -> None:
        node = self._node()
        await asyncio.to_thread(self.server.freeze, node)
        await asyncio.sleep(self.chance.uniform(1.0, 1.5 * SESSION))
        await asyncio.to_thread(self.server.thaw, node)
        await self._recovered()

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart, self._node())
        await self._recovered()

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)
        await eventually(lambda: not self.app.health().ok, RED, "health tells that the server is away")
        self.unhealthy_seen += 1
        await asyncio.to_thread(self.server.start)
        await self._recovered()

    async def lose(self) -> None:
        """One of three, every other time the one that coordinates the group: the others do its work until it is
        back."""
        coordinator = await self.server.facts.coordinator(f"group-of-{self.topic}")
        node = coordinator if self.faults.total() % 2 else self._node()
        await asyncio.to_thread(self.server.kill, node)
        await self._recovered()
        await asyncio.to_thread(self.server.start, node)

    def _node(self) -> int | None:
        return None if self.server.facts.nodes == 1 else self.chance.randint(1, self.server.facts.nodes)

    async def _recovered(self) -> None:
        """What is published now is handled, and the app is healthy."""
        began = time.monotonic()
        await self._works()
        await eventually(lambda: self.app.health().ok, GREEN, "the app is healthy again")
        self.recoveries.append(time.monotonic() - began)

    async def _works(self) -> None:
        end, probe = time.monotonic() + GREEN, self.chance.randint(1 << 40, 1 << 50)
        while probe not in self.published:
            assert time.monotonic() < end, f"nothing can be published: {self.app.health()}"
            await self._publish_one(probe := probe + 1)
        await eventually(lambda: self._handled(probe), GREEN, "what was published is handled")

    def _handled(self, number: int) -> bool:
        return f" {number} " in (self.directory / "app.log").read_text()

    async def settled(self, group: str) -> None:
        """Wait until all is handled and committed, and the app is healthy."""

        async def all_committed() -> bool:
            return not any((await lag(self.server.facts, self.topic, group)).values())

        await eventually(all_committed, GREEN, "everything is committed")
        await eventually(lambda: self.app.health().ok, GREEN, "the app is healthy at the end")


def main() -> int:
    from tests.services import kafka as services

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("one", "three"))
    parser.add_argument("faults", type=int)
    parser.add_argument("messages", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="streamfw-kafka-cuts-"))
    kind = {"one": services.ONE, "three": services.THREE}[given.kind]
    with services.own(kind, services.run_directory(f"cuts-{secrets.token_hex(4)}")) as server:
        run = asyncio.run(
            kafka_cut_run(server, directory, seed=given.seed, messages=given.messages, faults=given.faults)
        )
    print(directory, run, *run.findings.faults, sep="\n")
    return len(run.findings.faults) > 0


if __name__ == "__main__":
    sys.exit(main())
