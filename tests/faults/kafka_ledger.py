"""What a member of a Kafka group does, written by its own process (see `lines`). Times are in nanoseconds.

An *owner* is a partition's epoch in one process: ``<process>.<number>``.

    P <at> <generation> <partition> <start> <owner>              a partition is ours, from this offset on
    A <at> <generation> <partitions> <kept> <new>                all of them are assigned: the gate opens
    R <at> <generation> <partitions>                             revoked: the gate is shut
    E <at> <owner> moved|fenced|left                             an owner's end: it was taken away, or given to others
                                                                 because we were taken for dead, or we left the group
    H <began> <ended> <id> <partition> <offset> <owner> <batch>  a message was handled (batch 0: alone)
    C <sent> <answered> <generation> <partition>:<offset>...     a commit was accepted
    X <sent> <answered> <generation> <error>                     a commit was refused, or not answered
    G <partition> <count>                                        so many of its offsets had no record
    L <at> <nanoseconds>                                         the event loop had stood still for so long
    Z <name>=<count>...                                          the end, and what the source counted
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from aiokafka import TopicPartition

from streamfw.message import Message
from streamfw_kafka import opening
from streamfw_kafka.assignment import KafkaDelivery, Part
from streamfw_kafka.client import GroupConsumer
from streamfw_kafka.group import Membership
from tests.faults.lines import LineFile, lines_of

__all__ = ["Commit", "Handled", "Log", "MemberLedger", "Owner", "read", "recording"]

STANDSTILL = 0.25  # seconds that the loop may be late before it is written down
_COUNTED = ("kept", "fresh", "fenced", "rebalances", "commits", "refused")


class MemberLedger(LineFile):
    """One process's file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._numbers, self._batches = itertools.count(1), itertools.count(1)
        self.owners: dict[Part, str] = {}
        self.memberships: list[Membership] = []

    def owner(self, part: Part) -> str:
        if part not in self.owners:
            self.owners[part] = f"{self.process}.{next(self._numbers)}"
        return self.owners[part]

    def handled(self, began: int, handled: Mapping[int, Message], *, batch: bool = False) -> None:
        """These messages, by their ids, were handled; as a batch, or one by one."""
        now, number = time.monotonic_ns(), next(self._batches) if batch else 0
        lines = []
        for identity, message in handled.items():
            assert isinstance(message, KafkaDelivery)
            where = f"{message.partition} {message.offset} {self.owner(message.part)}"
            lines.append(f"H {began} {now} {identity} {where} {number}")
        self.write(*lines)

    @asynccontextmanager
    async def watching_the_loop(self) -> AsyncIterator[None]:
        """Write down when the loop stands still: that is why a member may be taken for dead."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic_ns()
            await asyncio.sleep(0.05)
            late = time.monotonic_ns() - before - 50_000_000
            if late > STANDSTILL * 1e9:
                self.write(f"L {time.monotonic_ns()} {late}")

    def end(self) -> None:
        """The process ends by itself."""
        counts = {name: sum(getattr(each, name) for each in self.memberships) for name in _COUNTED}
        self.write("Z " + " ".join(f"{name}={count}" for name, count in counts.items()))


class _Recorded(Membership):
    """A membership that writes down what it is given and what it gives up."""

    ledger: MemberLedger

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._known: set[Part] = set()
        self._how = "moved"
        self.ledger.memberships.append(self)

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        if self.parts:
            self.ledger.write(f"R {time.monotonic_ns()} {self.generation} {len(self.parts)}")
        await super().on_partitions_revoked(revoked)

    def drop_all(self) -> None:
        self._how = "left" if self.closed else "fenced"
        super().drop_all()
        self._how = "moved"

    async def take_over(self, assigned: Any) -> None:
        await super().take_over(assigned)
        # Nothing has suspended since the gate was opened.
        kept = len(self._known & set(self.parts.values()))
        self._note_new_owners()
        now = time.monotonic_ns()
        self.ledger.write(f"A {now} {self.generation} {len(self.parts)} {kept} {len(self.parts) - kept}")

    def restart(self, tp: TopicPartition, position: int) -> None:
        super().restart(tp, position)
        self._note_new_owners()

    def _note_new_owners(self) -> None:
        now = time.monotonic_ns()
        for part in self.parts.values():
            if part not in self._known:
                owner = self.ledger.owner(part)
                self.ledger.write(f"P {now} {self.generation} {part.tp.partition} {part.start} {owner}")
        self._known = set(self.parts.values())

    def _end(self, part: Part) -> None:
        super()._end(part)
        self.ledger.write(f"E {time.monotonic_ns()} {self.ledger.owner(part)} {self._how}")
        if part.gaps:
            self.ledger.write(f"G {part.tp.partition} {part.gaps}")


class _RecordedConsumer(GroupConsumer):
    """A consumer that writes down what became of its commits."""

    ledger: MemberLedger

    async def commit_once(self, offsets: Mapping[TopicPartition, int], *others: Any, **options: Any) -> None:
        sent, generation = time.monotonic_ns(), self.generation
        try:
            await super().commit_once(offsets, *others, **options)
        except BaseException as error:
            self.ledger.write(f"X {sent} {time.monotonic_ns()} {generation} {type(error).__name__}")
            raise
        moved = " ".join(f"{tp.partition}:{offset}" for tp, offset in offsets.items())
        self.ledger.write(f"C {sent} {time.monotonic_ns()} {generation} {moved}")


@contextmanager
def recording(ledger: MemberLedger) -> Iterator[None]:
    """What Kafka sources of this process do from now on goes into `ledger`."""
    membership: type[Membership] = type("Recorded", (_Recorded,), {"ledger": ledger})
    consumer: type[GroupConsumer] = type("RecordedConsumer", (_RecordedConsumer,), {"ledger": ledger})
    with (
        mock.patch.object(opening, "Membership", membership),
        mock.patch.object(opening, "GroupConsumer", consumer),
    ):
        yield


# ---------------------------------------------------------------------- reading it


@dataclass(slots=True)
class Handled:
    began: int
    ended: int
    partition: int
    offset: int
    owner: str
    batch: int
    stopped: bool = False  # its process stood still meanwhile

    @property
    def process(self) -> str:
        return self.owner.rpartition(".")[0]

    @property
    def seconds(self) -> float:
        return 0.0 if self.stopped else (self.ended - self.began) / 1e9


@dataclass(frozen=True, slots=True)
class Owner:
    """A partition in one epoch of one process."""

    name: str
    at: int
    generation: int
    partition: int
    start: int

    @property
    def process(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Commit:
    sent: int
    answered: int
    generation: int
    process: str
    offsets: Mapping[int, int]


@dataclass(slots=True)
class Log:
    """What all processes wrote."""

    handled: dict[int, list[Handled]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[str, Owner] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    revoked: list[tuple[int, str, int]] = field(default_factory=list)  # when, who, generation
    assigned: list[tuple[int, str, int]] = field(default_factory=list)
    fenced: dict[str, int] = field(default_factory=dict)  # owners, and when their process heard of it
    stood_still: list[tuple[int, str, int]] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    kept: int = 0
    new: int = 0


def read(directory: Path) -> Log:
    """Read the ledgers in `directory`."""
    log = Log()
    for process, (kind, *words) in lines_of(directory):
        if kind == "H":
            began, ended, identity, partition, offset, owner, batch = words
            entry = Handled(int(began), int(ended), int(partition), int(offset), owner, int(batch))
            log.handled[int(identity)].append(entry)
        elif kind == "P":
            at, generation, partition, start, name = words
            log.owners[name] = Owner(name, int(at), int(generation), int(partition), int(start))
        elif kind == "C":
            sent, answered, generation, *moved = words
            offsets = {int(p): int(o) for p, _, o in (each.partition(":") for each in moved)}
            log.commits.append(Commit(int(sent), int(answered), int(generation), process, offsets))
        elif kind == "X":
            log.refused[words[3]] += 1
        elif kind == "R":
            log.revoked.append((int(words[0]), process, int(words[1])))
        elif kind == "A":
            log.assigned.append((int(words[0]), process, int(words[1])))
            log.kept += int(words[3])
            log.new += int(words[4])
        elif kind == "E" and words[2] == "fenced":
            log.fenced[words[1]] = int(words[0])
        elif kind == "L":
            log.stood_still.append((int(words[0]), process, int(words[1])))
        elif kind == "G":
            log.gaps[int(words[0])] += int(words[1])
    return log
