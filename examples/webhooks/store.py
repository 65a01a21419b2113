"""Where the service keeps its summary: in memory, in Postgres, or in a file.

All are idempotent by message id: a webhook that is delivered twice is stored once. Beside the summary lies a journal
of deliveries, written outside the handler's transaction, so that it also tells of those that came to nothing.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec

__all__ = ["Delivered", "MemoryStore", "Store", "Stored", "Total", "Unit", "open_store"]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook that was handled. `worker` is the process that did it; `at` is in seconds since 1970."""

    message_id: str
    owner: str
    event: str
    line: str
    attempt: int
    worker: int
    at: float = 0.0


class Delivered(msgspec.Struct, frozen=True):
    """An entry of the journal: a handler ``began`` with a message, or ``failed`` at it."""

    message_id: str
    what: Literal["began", "failed"]
    worker: int
    at: float


class Total(msgspec.Struct, frozen=True):
    """How many webhooks of one event."""

    event: str
    webhooks: int


class Unit(Protocol):
    """The transaction that ends the message, where the broker has one."""

    connection: object


class Store(ABC):
    """The summary and the journal."""

    @abstractmethod
    async def add(self, webhook: Stored, unit: Unit | None) -> None:
        """Store a webhook and count it, unless it is there already; within `unit`, if there is one."""

    @abstractmethod
    async def note(self, message_id: str, what: Literal["began", "failed"], worker: int) -> None:
        """Write into the journal, at once."""

    @abstractmethod
    async def count(self) -> int:
        """How many webhooks are stored."""

    @abstractmethod
    async def last_worker(self) -> int | None:
        """The process that stored the newest webhook."""

    @abstractmethod
    async def unfinished(self, worker: int) -> int:
        """How many messages this process began with, and neither stored nor failed at yet."""

    @abstractmethod
    async def webhooks(self) -> Sequence[Stored]:
        """All of them, in the order they were stored."""

    @abstractmethod
    async def journal(self) -> Sequence[Delivered]:
        """All entries, oldest first."""

    @abstractmethod
    async def totals(self) -> Sequence[Total]:
        """The summary: webhooks by event, most first."""


class MemoryStore(Store):
    """For one process, and as long as it lives."""

    def __init__(self) -> None:
        self._webhooks: dict[str, Stored] = {}
        self._journal: list[Delivered] = []
        self._totals: Counter[str] = Counter()

    async def add(self, webhook: Stored, unit: Unit | None) -> None:
        if webhook.message_id not in self._webhooks:
            self._webhooks[webhook.message_id] = msgspec.structs.replace(webhook, at=time.time())
            self._totals[webhook.event] += 1

    async def note(self, message_id: str, what: Literal["began", "failed"], worker: int) -> None:
        self._journal.append(Delivered(message_id, what, worker, time.time()))

    async def count(self) -> int:
        return len(self._webhooks)

    async def last_worker(self) -> int | None:
        return next((stored.worker for stored in reversed(self._webhooks.values())), None)

    async def unfinished(self, worker: int) -> int:
        entries = Counter(entry.what for entry in self._journal if entry.worker == worker)
        stored = sum(webhook.worker == worker for webhook in self._webhooks.values())
        return entries["began"] - entries["failed"] - stored

    async def webhooks(self) -> Sequence[Stored]:
        return list(self._webhooks.values())

    async def journal(self) -> Sequence[Delivered]:
        return list(self._journal)

    async def totals(self) -> Sequence[Total]:
        return [Total(event, webhooks) for event, webhooks in self._totals.most_common()]


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """The store that goes with a broker's URL: where the messages are, if tables are there; else the file that
    WEBHOOKS_STORE names."""
    if url.startswith("memory:"):
        yield MemoryStore()
    elif url.startswith("postgres"):
        from .postgres_store import open_postgres_store  # needs asyncpg, as the Postgres broker does

        async with open_postgres_store(url) as store:
            yield store
    else:
        from .sqlite_store import open_sqlite_store

        async with open_sqlite_store(os.environ.get("WEBHOOKS_STORE", "webhooks.sqlite")) as file:
            yield file
