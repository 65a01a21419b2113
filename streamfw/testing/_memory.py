"""The memory broker that stands in for an app's own.

It takes what was written for another broker by its meaning: a source object by its name and by what it says of others
(`streamfw.broker.Routed`), ``ordered_by="partition"`` as a topic of one partition, a transaction from whoever the test
says. What it cannot mean is a mistake, told at build.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from streamfw._memory_store import Queue, Store
from streamfw.broker import (
    Capabilities,
    Connection,
    Delivery,
    Health,
    Routed,
    Settlement,
    Source,
    Subscription,
    UnitOfWork,
)
from streamfw.errors import LeaseLost, SettleError, Unsupported
from streamfw.memory import MemoryBroker, MemoryConnection
from streamfw.message import Outgoing
from streamfw.outcome import ACK, Ack, Outcome

from ._routes import Routes

__all__ = ["StandIn", "TransactionFactory"]

TransactionFactory = Callable[[], AbstractAsyncContextManager[object]]
logger = logging.getLogger("streamfw")


class RoutedStore(Store):
    """A store that also leads messages by the routes of source objects. What reaches nobody waits, as in any store, at
    its name where nobody has that, and is gone otherwise."""

    __slots__ = ("routes",)

    def __init__(self) -> None:
        super().__init__()
        self.routes = Routes()

    def _put(
        self, message: Outgoing, size: int, stamp: float, queues: Iterable[Queue] | None, due: float | None
    ) -> None:
        if queues is None:
            queues = self._reached(message)
        super()._put(message, size, stamp, queues, due)

    def _reached(self, message: Outgoing) -> Iterable[Queue]:
        reached = self.routes.reached(message.name, message.key, message.headers)
        groups = {(subscription.name, subscription.group) for subscription in reached}
        found = [queue for name, group in groups if (queue := self.topics.get(name, {}).get(group)) is not None]
        return found if found or self.has_groups(message.name) else self.queues(message.name).values()


class StandIn(MemoryBroker):
    """A memory broker in the place of the broker `name`. `clock` is what its delays are measured by."""

    def __init__(self, name: str, clock: Callable[[], float] | None, transaction: TransactionFactory | None) -> None:
        super().__init__()
        self.name, self.transaction = name, transaction
        self._store = self.store = RoutedStore()
        if clock is not None:
            self._store.clock = clock

    def describe(self) -> str:
        return f"memory:// (in the place of {self.name!r})"

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        # `transactions` is said here and qualified in `mistakes`, which says what to do about it.
        orders = self.capabilities.ordered_by | {"partition"}
        return msgspec.structs.replace(super().capabilities_of(subscription), ordered_by=orders, transactions=True)

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        if not subscription.group:
            yield "a group needs a name"
        if isinstance(source := subscription.source, Routed):
            try:
                source.route(subscription.name)
            except (ValueError, Unsupported) as error:
                yield str(error)
        if subscription.transactional and self.transaction is None:
            yield (
                "transactional=True: memory has no transactions; say what its handler gets, TestApp(app, "
                "transaction=a function that gives an async context manager), or run on the app's own broker, live=True"
            )

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Connection, None]:
        self._store.enter()
        connection = _StandInConnection(self, self._store)
        try:
            yield connection
        finally:
            await connection.close()
            self._store.leave()

    def ready(self, subscription: Subscription) -> bool:
        """Whether somebody of this subscription's group could take something now."""
        queue = self._store.topics.get(subscription.name, {}).get(subscription.group)
        return queue is not None and queue.ready


class _StandInConnection(MemoryConnection):
    """Opens sources that do what the memory broker's own do not."""

    def __init__(self, broker: StandIn, store: Store) -> None:
        super().__init__(broker, store)
        self._stand_in = broker

    async def open(self, subscription: Subscription) -> Source:
        self._stand_in.store.routes.add(subscription)
        if subscription.ordered_by != "partition" and not subscription.transactional:
            return await super().open(subscription)
        understood = copy.copy(subscription)
        if subscription.ordered_by == "partition":
            understood.ordered_by = None
        return _StandInSource(await super().open(understood), subscription, self._stand_in.transaction)


class _StandInSource(Source):
    """A memory source with one partition, or with somebody else's transactions."""

    def __init__(self, inner: Source, subscription: Subscription, transaction: TransactionFactory | None) -> None:
        self._inner, self._transaction = inner, transaction
        self._partition = 0 if subscription.ordered_by == "partition" else None

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        deliveries = await self._inner.fetch(limit, max_bytes)
        if self._partition is not None:
            for delivery in deliveries:
                delivery.lane = self._partition
        return deliveries

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        return await self._inner.settle(settlements)

    async def stop(self) -> None:
        await self._inner.stop()

    async def flush(self, deadline: float) -> None:
        await self._inner.flush(deadline)

    async def close(self) -> None:
        await self._inner.close()

    def health(self) -> Health:
        return self._inner.health()

    @asynccontextmanager
    async def transaction(self, deliveries: Sequence[Delivery]) -> AsyncGenerator[UnitOfWork, None]:
        assert self._transaction is not None, "refused at build"
        failure: BaseException | None = None
        try:
            async with self._transaction() as connection:
                unit = _Unit(deliveries, connection)
                try:
                    yield unit
                except BaseException as error:
                    failure = error
                    raise
                if not unit.finished:
                    raise _RollBack
        except _RollBack:
            return
        if failure is not None:
            raise failure  # the transaction swallowed it: it is the handler's all the same
        # It is committed. Only now: a message whose commit failed is tried again.
        if unit.finished:
            for lost in await self._inner.settle([Settlement(delivery, ACK) for delivery in deliveries]):
                logger.warning("%s", lost)


class _RollBack(Exception):
    """Leaves the user's transaction the way that rolls it back."""


class _Unit(UnitOfWork):
    def __init__(self, deliveries: Sequence[Delivery], connection: object) -> None:
        self._deliveries, self.connection = deliveries, connection
        self.finished = False

    async def finish(self, outcome: Outcome) -> None:
        for delivery in self._deliveries:
            if delivery.lost:
                raise LeaseLost(delivery, "given back when its source closed")
        self.finished = isinstance(outcome, Ack)
