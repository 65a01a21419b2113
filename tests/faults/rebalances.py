"""Members of a Kafka group that come, leave, are killed and stand still, while messages flow through their partitions.

python -m tests.faults.rebalances EVENTS MESSAGES [--mode single|key|batch] [--storm] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from tests.faults.kafka_ledger import read
from tests.faults.processes import Processes
from tests.faults.rebalance_member import SESSION
from tests.faults.rebalance_oracle import Fate, Findings, judge, out_of_order
from tests.helpers import eventually
from tests.services.kafka import Kafka, OwnKafka

__all__ = ["Mode", "RebalanceRun", "rebalance_run"]

Mode: TypeAlias = Literal["single", "key", "batch"]
Kind: TypeAlias = Literal["join", "leave", "kill", "stop"]
KINDS: tuple[Kind, ...] = ("join", "leave", "kill", "stop")
PARTITIONS = 12
KEYS = 240
FEWEST, FIRST, MOST = 2, 4, 6  # members
RATE = 900  # messages a second, while they flow
STABLE = 60.0  # seconds


@dataclass(slots=True)
class RebalanceRun:
    findings: Findings
    events: Counter[str]
    of_server: Counter[str]
    seconds: float

    def __str__(self) -> str:
        found = self.findings
        return (
            f"{dict(self.events)} {dict(self.of_server)}, {found.generations} generations in {self.seconds:.0f} s; "
            f"{found.handled} of {found.published} handled; "
            f"repeated: {found.causes} (begun too late: {found.overtaken}); "
            f"a kill: {[cost.repeated for cost in found.kills]} of at most {[cost.most for cost in found.kills]}; "
            f"pauses of a member {found.pauses}, of the group {found.group_pauses}, "
            f"longest handler {found.longest_handler * 1000:.0f} ms; partitions kept {found.kept}, new {found.new}; "
            f"commits each {found.cadence * 1000:.0f} ms, refused {dict(found.refused)}; "
            f"partitions lost by members that were taken for dead {found.fenced}"
        )


class Members(Processes):
    """The processes of a group, and what befell each."""

    def __init__(self, url: str, topic: str, group: str, directory: Path, mode: Mode) -> None:
        super().__init__(
            directory, "rebalance_member", lambda ledger: [url, topic, group, str(ledger), mode], called="member"
        )
        self.fates: list[Fate] = []

    def leave(self, name: str) -> None:
        self._befell(name, "leave")
        super().leave(name)

    async def kill(self, name: str) -> None:
        self._befell(name, "kill")
        await super().kill(name)

    def stop(self, name: str) -> None:
        self._befell(name, "stop")
        self._alive[name].send_signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        process = self._alive.get(name) or self._leaving.get(name)
        if process is not None and process.returncode is None:  # else it was killed meanwhile
            process.send_signal(signal.SIGCONT)
            self._befell(name, "go on")

    def _befell(self, name: str, kind: Literal["kill", "stop", "go on", "leave"]) -> None:
        self.fates.append(Fate(time.monotonic_ns(), kind, name))


class Group:
    """What the server says of the group."""

    def __init__(self, admin: AIOKafkaAdminClient, group: str) -> None:
        self._admin, self.name = admin, group

    async def settled(self, members: int) -> bool:
        """Whether it is stable, with so many members."""
        try:
            (response,) = await self._admin.describe_consumer_groups([self.name])
        except KafkaError:  # its coordinator is being made, or away
            return False
        (described,) = response.to_object()["groups"]
        return described["state"] == "Stable" and len(described["members"]) == members

    async def until(self, members: int) -> None:
        await eventually(lambda: self.settled(members), STABLE, f"the group is stable with {members} members")

    async def committed(self) -> int:
        try:
            found = await self._admin.list_consumer_group_offsets(self.name)
        except KafkaError:
            return 0
        return sum(meta.offset for meta in found.values() if meta.offset > 0)


class _Run:
    def __init__(
        self, members: Members, group: Group, chance: random.Random, storm: bool, server: OwnKafka | None
    ) -> None:
        self.members, self.group, self.chance, self.storm, self.server = members, group, chance, storm, server
        self.events: Counter[str] = Counter()
        self.of_server: Counter[str] = Counter()
        self._share = 0.0  # of the messages that may flow by now
        self._thawing: set[asyncio.Task[None]] = set()

    # -- what happens

    async def harm(self, events: int) -> None:
        """`events` of them, a quarter of each kind, in any order that keeps the number of members in bounds."""
        left = Counter({kind: (events + number) // 4 for number, kind in enumerate(KINDS)})
        while left.total():
            kind = await self._next(left)
            self._share = (self.events.total() + 1.5) / events
            await asyncio.sleep(self.chance.uniform(0.05, 1.2) if self.storm else self.chance.uniform(0.1, 0.6))
            await self._do(kind)
            left[kind] -= 1
            self.events[kind] += 1
            self.members.check()
            if self.server is not None and self.events.total() % 3 == 0:
                await self._harm(self.server)
            if not self.storm:
                await self.group.until(len(self.members.names))
        self._share = 1.0
        await asyncio.gather(*self._thawing)
        await self.group.until(len(self.members.names))

    async def _next(self, left: Counter[Kind]) -> Kind:
        while True:
            count = len(self.members.names)
            possible = [
                kind
                for kind in KINDS
                if left[kind] and not (kind == "join" and count >= MOST) and not (kind in _LESS and count <= FEWEST)
            ]
            if possible:
                return self.chance.choice(possible)
            await self._do("leave" if count >= MOST else "join")  # which is not counted
            await self.group.until(len(self.members.names))

    async def _do(self, kind: Kind) -> None:
        members = self.members
        if kind == "join":
            await members.start()
            return
        name = self.chance.choice(members.names)
        if kind == "leave":
            members.leave(name)
        elif kind == "kill":
            await members.kill(name)
        elif self.storm:
            members.stop(name)
            task = asyncio.create_task(self._thaw(name, self.chance.uniform(0.2, 1.5 * SESSION)))
            self._thawing.add(task)
            task.add_done_callback(self._thawing.discard)
        else:
            members.stop(name)
            await self.group.until(len(members.names) - 1)  # its session is over, and others have its partitions
            await asyncio.sleep(self.chance.uniform(0.0, 0.5))
            members.go_on(name)

    async def _harm(self, server: OwnKafka) -> None:
        """Let something happen to the node that coordinates the group, most likely while its members move."""
        node = await server.facts.coordinator(self.group.name)
        await asyncio.sleep(self.chance.uniform(0.0, 0.6))
        began, kind = time.monotonic_ns(), self.chance.choice(("restarted", "killed (SIGKILL)", "frozen"))
        if kind == "restarted":
            await asyncio.to_thread(server.restart, node)
        elif kind == "frozen":
            await asyncio.to_thread(server.freeze, node)
            await asyncio.sleep(self.chance.uniform(0.5, 2 * SESSION))
            await asyncio.to_thread(server.thaw, node)
        else:
            await asyncio.to_thread(server.kill, node)
            await asyncio.sleep(self.chance.uniform(0.0, 2 * SESSION))
            await asyncio.to_thread(server.start, node)
        self.members.fates.append(Fate(began, "server", until=time.monotonic_ns()))
        self.of_server[f"coordinator {kind}"] += 1

    async def _thaw(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.members.go_on(name)

    # -- what flows

    async def publish(self, bootstrap: str, topic: str, messages: int) -> None:
        """At `RATE`, from shortly before each event on, but never far ahead: messages flow during all of them."""
        began, published = time.monotonic(), 0
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5, enable_idempotence=True) as producer:
            sent = []
            while published < messages:
                due = min(messages, int(self._share * messages), published + int((time.monotonic() - began) * RATE))
                began = time.monotonic()
                for number in range(published, due):
                    key = number % KEYS
                    body = b'{"id":%d,"pad":"%s"}' % (number, b"x" * 100)
                    sent.append(await producer.send(topic, body, key=b"%d" % key, partition=key % PARTITIONS))
                published = max(published, due)
                await asyncio.sleep(0.02)
            await asyncio.gather(*sent)


_LESS = ("leave", "kill")


async def rebalance_run(
    kafka: Kafka,
    directory: Path,
    *,
    seed: int,
    messages: int,
    events: int,
    mode: Mode = "single",
    storm: bool = False,
    server: OwnKafka | None = None,
) -> RebalanceRun:
    """Let `events` happen to two to six members while `messages` flow through 12 partitions; end when everything is
    handled and committed, and all members have left. With `storm` the events overlap, also each other's rebalances.
    With `server` every third is followed by something that happens to the group's coordinator."""
    began = time.monotonic()
    topic = await kafka.create_topic(f"rebalances-{mode}-{secrets.token_hex(4)}", PARTITIONS)
    await kafka.create_topic(f"{topic}.dead", 1)
    crew = Members(kafka.url, topic, f"group-of-{topic}", directory, mode)
    async with _admin(kafka.bootstrap) as admin:
        try:
            run = _Run(crew, Group(admin, f"group-of-{topic}"), random.Random(seed), storm, server)
            for _ in range(FIRST):
                await crew.start()
            await run.group.until(FIRST)
            await _together(run, kafka.bootstrap, topic, messages, events)
            await _finished(run.group, crew, messages)
            await crew.end()
        finally:
            await crew.abandon()
    log = read(directory)
    findings = judge(log, range(messages), crew.fates, session=SESSION, fifo=mode == "single")
    if mode == "key":
        findings.wrong("messages of a key were out of order", out_of_order(log, KEYS))
    return RebalanceRun(findings, run.events, run.of_server, time.monotonic() - began)


async def _together(run: _Run, bootstrap: str, topic: str, messages: int, events: int) -> None:
    async with asyncio.TaskGroup() as both:
        both.create_task(run.publish(bootstrap, topic, messages))
        both.create_task(run.harm(events))


async def _finished(group: Group, crew: Members, messages: int) -> None:
    end = time.monotonic() + 90
    while (committed := await group.committed()) < messages:
        crew.check()
        assert time.monotonic() < end, f"{committed} of {messages} are committed; {crew.names}"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


def main() -> int:
    from tests.services import kafka as services

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=int)
    parser.add_argument("messages", type=int)
    parser.add_argument("--mode", choices=("single", "key", "batch"), default="single")
    parser.add_argument("--storm", action="store_true", help="let the events overlap")
    parser.add_argument("--nodes", type=int, choices=(0, 1, 3), default=0, help="harm a server of so many nodes, too")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="streamfw-rebalances-"))
    kind = services.THREE if given.nodes == 3 else services.ONE
    with services.own(kind, services.run_directory(f"rebalances-{secrets.token_hex(4)}")) as server:
        run = asyncio.run(
            rebalance_run(
                server.facts,
                directory,
                seed=given.seed,
                messages=given.messages,
                events=given.events,
                mode=given.mode,
                storm=given.storm,
                server=server if given.nodes else None,
            )
        )
    print(directory, run, *run.findings.faults, sep="\n")
    return len(run.findings.faults) > 0


if __name__ == "__main__":
    sys.exit(main())
