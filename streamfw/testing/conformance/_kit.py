"""What the conformance tests stand on: the hooks of a suite, and members of a group driven by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from streamfw.broker import Broker, Capabilities, Connection, Delivery, Settlement, Source, Subscription
from streamfw.errors import BrokerError, PublishError, SettleError
from streamfw.message import Outgoing, new_message_id
from streamfw.outcome import ACK, Outcome

MIB = 1024 * 1024
HANDS = 500
"""How many messages a member may have begun: a broker may send a process no more than its workers can begin."""


class ConformanceKit:
    """What a suite may set and override; see `streamfw.testing.conformance`."""

    pytestmark = pytest.mark.asyncio

    grace: float = 1.0
    """Seconds that a timed event may be late beyond the broker's own granularity: 1 in process, 5 on a server."""
    patience: float = 10.0
    """Seconds to wait for what must come."""
    quiet: float = 0.3
    """Seconds to wait where nothing must come."""

    @pytest.fixture
    def broker(self) -> Broker:
        """The broker under test, configured and not connected. A suite overrides this fixture; it may be async, and
        end what it started."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `broker` that gives the broker under test")

    def another(self, broker: Broker) -> Broker:
        """The broker as a second process would configure it. Where messages live in the object, the object itself."""
        return broker

    async def interrupt(self, broker: Broker) -> bool:
        """Cut every connection, as a network does, and answer True. Where there is nothing to cut: False, and the
        tests close and connect again instead."""
        return False

    def unpublishable(self, broker: Broker, name: str) -> Outgoing:
        """A message to `name` that the broker must refuse, alone. By default one larger than the declared limit, or,
        where nothing is kept, one to a name that nobody has subscribed to."""
        capabilities = broker.capabilities_of(Subscription(name))
        if capabilities.max_body is not None:
            return outgoing(name, bytes(capabilities.max_body + 1))
        if not capabilities.kept:
            return outgoing(f"{name}.nobody", b"x")
        raise NotImplementedError(f"{type(self).__name__}.unpublishable: which message does {broker!r} refuse?")

    def unreachable(self, broker: Broker, password: str) -> Broker:
        """A broker of the same kind whose URL holds `password`, and which (on a server) cannot be connected to."""
        scheme = broker.url.partition("://")[0]
        return type(broker)(f"{scheme}://somebody:{password}@127.0.0.1:1/nowhere")

    # For the tests

    @pytest.fixture
    def name(self) -> str:
        """A name that nobody has used before."""
        return f"conformance.{uuid4().hex[:12]}"

    @pytest.fixture
    def capabilities(self, broker: Broker, name: str) -> Capabilities:
        return broker.capabilities_of(Subscription(name))

    @asynccontextmanager
    async def member(self, broker: Broker, name: str, group: str = "default", **options: Any) -> AsyncIterator[Member]:
        """A process of the group: a connection of its own and one source, closed in good order at the end. It takes as
        many as a test wants without settling them, as `HANDS` workers would."""
        if not options.get("transactional"):  # there each may need a connection of its own
            options.setdefault("workers", HANDS)
        subscription = Subscription(name, group, member=f"member-{uuid4().hex[:8]}", **options)
        async with broker.connect() as connection:
            member = Member(connection, await connection.open(subscription), self.patience)
            try:
                yield member
            finally:
                await member.close()


class Member:
    """One source, driven as the runtime does: a fetch is never cancelled, a transient error is followed by `reopen`,
    and a settlement that raised one is repeated."""

    def __init__(self, connection: Connection, source: Source, patience: float) -> None:
        self.connection = connection
        self.source = source
        self._patience = patience
        self._pending: asyncio.Task[Sequence[Delivery]] | None = None
        self._limit = 0
        self._stopped = False
        self._closed = False

    async def send(self, name: str, *bodies: bytes, **fields: Any) -> list[str]:
        """Publish these bodies in one call; every one must be accepted. The messages' ids."""
        messages = [outgoing(name, body, **fields) for body in bodies]
        assert errors_of(await self.connection.publish(messages)) == []
        return [message.message_id for message in messages]

    async def poll(self, seconds: float, limit: int = 100, max_bytes: int = 64 * MIB) -> list[Delivery]:
        """What one fetch brings within `seconds`; nothing when it is still waiting then (it goes on)."""
        deadline = time.monotonic() + seconds
        while True:
            if self._pending is None:
                self._limit = limit
                self._pending = asyncio.create_task(self._fetch(limit, max_bytes))
                # A test that failed leaves it behind; what it ends with is then nobody's concern.
                self._pending.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.wait({self._pending}, timeout=max(0.0, deadline - time.monotonic()))
            if not self._pending.done():
                return []
            task, self._pending = self._pending, None
            try:
                return self._checked(task.result())
            except BrokerError as error:
                if not error.transient or time.monotonic() > deadline:
                    raise
                await self.reopen()

    async def _fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        return await self.source.fetch(limit, max_bytes)

    def _checked(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        assert len(deliveries) <= self._limit, f"fetch({self._limit}) returned {len(deliveries)} deliveries"
        if not self._stopped:
            assert deliveries, "fetch returned nothing although nobody stopped the source"
        return list(deliveries)

    async def take(self, count: int, max_bytes: int = 64 * MIB) -> list[Delivery]:
        """The next `count` deliveries, unsettled; fails when they do not come in time."""
        taken: list[Delivery] = []
        while len(taken) < count:
            chunk = await self.poll(self._patience, count - len(taken), max_bytes)
            assert chunk, f"{count} deliveries were expected, {len(taken)} came within {self._patience} s"
            taken += chunk
        return taken

    async def take_all(self, seconds: float) -> list[Delivery]:
        """Whatever comes until nothing does for `seconds`."""
        taken: list[Delivery] = []
        while chunk := await self.poll(seconds):
            taken += chunk
        return taken

    async def expect_nothing(self, seconds: float) -> None:
        chunk = await self.poll(seconds, limit=1)
        assert not chunk, f"nothing should come, but {chunk} did"

    async def settle(self, deliveries: Iterable[Delivery], outcome: Outcome = ACK) -> list[SettleError]:
        """Settle all of them alike, in one group; the errors answered."""
        group = [Settlement(delivery, outcome) for delivery in deliveries]
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return list(await self.source.settle(group))
            except BrokerError as error:
                if not error.transient or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)  # a server that comes back has no event to wait for

    async def acknowledge(self, deliveries: Iterable[Delivery]) -> None:
        """All of them, and no error."""
        assert await self.settle(deliveries) == []

    async def flush(self) -> None:
        await self.source.flush(asyncio.get_running_loop().time() + self._patience)

    async def reopen(self) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await self.source.reopen()
            except BrokerError as error:
                if not error.transient or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)  # as above

    async def stop(self) -> list[Delivery]:
        """Stop the source; what its pending fetch still brought (nothing, where all is well)."""
        self._stopped = True
        await self.source.stop()
        brought: list[Delivery] = []
        if self._pending is not None:
            await asyncio.wait({self._pending}, timeout=self._patience)
            assert self._pending.done(), f"stop() did not end the pending fetch within {self._patience} s"
            task, self._pending = self._pending, None
            try:
                brought = list(task.result())
            except BrokerError as error:
                if not error.transient:
                    raise
        return brought

    async def close(self) -> None:
        """Stop, flush, close: the end of every subscriber. What is unsettled is released."""
        if not self._closed:
            self._closed = True
            await self.stop()
            await self.flush()
            await asyncio.wait_for(self.source.close(), self._patience)


def outgoing(name: str, body: bytes = b"{}", **fields: Any) -> Outgoing:
    """A message with an id of its own."""
    return Outgoing(name=name, body=body, **{"message_id": new_message_id(), **fields})


def errors_of(answers: Sequence[PublishError | None]) -> list[PublishError]:
    return [answer for answer in answers if answer is not None]


def answers_for(messages: Sequence[Outgoing], answers: Sequence[PublishError | None]) -> list[PublishError | None]:
    """One answer for each message, also where the broker says with an empty sequence that all went well."""
    assert len(answers) in (0, len(messages)), f"{len(answers)} answers to {len(messages)} messages"
    return list(answers) or [None] * len(messages)


def ids(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.message_id for delivery in deliveries]


def bodies(deliveries: Iterable[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Bodies that tell their place."""
    return [b"%d" % number for number in range(first, first + count)]
