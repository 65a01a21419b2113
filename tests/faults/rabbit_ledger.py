"""What an app on RabbitMQ does, written by its own process (see `lines`). Times are in nanoseconds.

A *channel* is one of AMQP's in one process, ``<process>.<number>``; or (of a stream, whose messages stay ours over many
channels) what a process reads under one hold of the group's offset, ``<process>.s<number>``.

    C <at> <channel> <queue>                            it begins to consume from the queue
    A <at> <channel> <tag> <1: and all before it>       an acknowledgement has been written to the socket
    E <at> <channel> <by whom> <code>                   it has ended: `Closed.kind` and `Closed.code`
    H <began> <ended> <name> <id> <copy> <attempt> <outcome> <channel> <tag>
                                                        a message was handled: ok, retry or dead

`copy` counts how often its publisher has published the id: from 1.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import msgspec

from streamfw import Message
from streamfw_rabbit._base import BaseChannel
from streamfw_rabbit.channel import Closed
from streamfw_rabbit.delivery import RabbitDelivery
from streamfw_rabbit.source import RabbitSource
from streamfw_rabbit.streams import Reading, StreamDelivery
from tests.faults.lines import LineFile, lines_of

__all__ = ["COPY", "Ack", "End", "Entry", "Log", "Outcome", "RabbitLedger", "Watch", "Work", "read", "recording"]

COPY = "copy"
"""The header in which a message says which of its copies it is."""

TURNS = 4
"""Of the event loop, after which what a channel was told to write has been written: a process that is killed may have
stood still before. (One, and the library's writer is a task of its own.)"""

Outcome: TypeAlias = Literal["ok", "retry", "dead"]


class Work(msgspec.Struct):
    id: int


class RabbitLedger(LineFile):
    """One process's file. `ended` is called when a consumer, or its channel, has just ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._readings: dict[int, Reading] = {}
        self.ended: Callable[[], None] = lambda: None

    def handled(self, began: int, message: Message, outcome: Outcome = "ok") -> None:
        """It is handled, and comes to this end."""
        self.write(self._line(began, message, outcome))

    def handled_all(self, began: int, batch: list[Message]) -> None:
        self.write(*(self._line(began, message, "ok") for message in batch))

    def _line(self, began: int, message: Message, outcome: Outcome) -> str:
        assert isinstance(message, RabbitDelivery)
        number = msgspec.json.decode(message.body, type=Work).id
        what = f"{message.name} {number} {message.headers[COPY]} {message.attempt} {outcome}"
        return f"H {began} {time.monotonic_ns()} {what} {self._place(message)}"

    def _place(self, delivery: RabbitDelivery) -> str:
        if not isinstance(delivery, StreamDelivery):
            return f"{self.process}.{delivery.epoch} {delivery.tag}"
        reading = delivery.reading
        self._readings[id(reading)] = reading  # kept, so that no other gets its id
        return f"{self.process}.s{list(self._readings).index(id(reading))} {delivery.offset}"


@contextmanager
def recording(ledger: RabbitLedger) -> Iterator[None]:
    """What channels of this process do from now on goes into `ledger`."""
    with (
        mock.patch.object(BaseChannel, "consume", _consuming(ledger, BaseChannel.consume)),
        mock.patch.object(BaseChannel, "ack", _acknowledging(ledger, BaseChannel.ack)),
        mock.patch.object(BaseChannel, "_ended", _ending(ledger, BaseChannel._ended)),
        mock.patch.object(RabbitSource, "_cancelled", _cancelling(ledger, RabbitSource._cancelled)),
    ):
        yield


def _consuming(ledger: RabbitLedger, consume: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(consume)
    async def recorded(self: BaseChannel, queue: str, *others: Any, **options: Any) -> None:
        ledger.write(f"C {time.monotonic_ns()} {ledger.process}.{self.epoch} {queue}")
        await consume(self, queue, *others, **options)

    return recorded


def _acknowledging(ledger: RabbitLedger, ack: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(ack)
    def recorded(self: BaseChannel, tag: int, multiple: bool = False) -> bool:
        written = ack(self, tag, multiple)
        if written:
            line = f"{ledger.process}.{self.epoch} {tag} {multiple:d}"
            _later(TURNS, lambda: ledger.write(f"A {time.monotonic_ns()} {line}"))
        return written

    return recorded


def _later(turns: int, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call if turns == 1 else lambda: _later(turns - 1, call))


def _ending(ledger: RabbitLedger, ended: Callable[..., None]) -> Callable[..., None]:
    @wraps(ended)
    def recorded(self: BaseChannel, closed: Closed) -> None:
        first = self.closed is None
        ended(self, closed)
        if first:
            ledger.write(f"E {time.monotonic_ns()} {ledger.process}.{self.epoch} {closed.kind} {closed.code}")
            ledger.ended()

    return recorded


def _cancelling(ledger: RabbitLedger, cancelled: Callable[..., None]) -> Callable[..., None]:
    @wraps(cancelled)
    def recorded(self: RabbitSource, *arguments: Any) -> None:
        cancelled(self, *arguments)
        ledger.ended()

    return recorded


# ---------------------------------------------------------------------- reading it


@dataclass(frozen=True, slots=True)
class Entry:
    """A message was handled."""

    began: int
    ended: int
    name: str
    id: int
    copy: int
    attempt: int
    outcome: str
    channel: str
    tag: int

    @property
    def process(self) -> str:
        return self.channel.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Ack:
    at: int
    tag: int
    multiple: bool


@dataclass(frozen=True, slots=True)
class End:
    at: int
    by: str
    code: int


@dataclass(slots=True)
class Log:
    """What all processes wrote. `queues`: by channel, where it consumed last; `acks` are in order."""

    entries: list[Entry] = field(default_factory=list)
    queues: dict[str, str] = field(default_factory=dict)
    acks: dict[str, list[Ack]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, End] = field(default_factory=dict)


def read(directory: Path) -> Log:
    """Read the ledgers in `directory`."""
    log = Log()
    for _, (kind, *words) in lines_of(directory):
        if kind == "H":
            log.entries.append(_entry(words))
        elif kind == "C":
            log.queues[words[1]] = words[2]
        elif kind == "A":
            log.acks[words[1]].append(Ack(int(words[0]), int(words[2]), words[3] == "1"))
        else:
            log.ends[words[1]] = End(int(words[0]), words[2], int(words[3]))
    return log


def _entry(words: list[str]) -> Entry:
    began, ended, name, number, copy, attempt, outcome, channel, tag = words
    return Entry(int(began), int(ended), name, int(number), int(copy), int(attempt), outcome, channel, int(tag))


class Watch:
    """Follows the ledgers while they are written. `done`: names and ids that came to their end there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = defaultdict(int)
        self.done: set[tuple[str, int]] = set()

    def look(self) -> set[tuple[str, int]]:
        """`done`, as of now."""
        for path in self._directory.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] += len(whole) + len(newline)
            for line in whole.decode().splitlines():
                words = line.split(" ")
                if words[0] == "H" and words[7] == "ok":
                    self.done.add((words[3], int(words[4])))
        return self.done

    def has(self, name: str, number: int) -> bool:
        """Whether that id has come to its end there."""
        return (name, number) in self.done or (name, number) in self.look()
