"""MemoryBroker: a real broker, in this process.

It has what the others have (groups, keys, delays, attempts, dead letters, back-pressure), and its messages live as
long as its store does: with the broker object, or with all brokers of one name in the process. It serves tests, the
first steps of a project, and programs of one process whose messages may die with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import msgspec

from ._memory_store import Queue, Store, Stored, as_messages, now
from .broker import (
    REPLY_PREFIX,
    Broker,
    Capabilities,
    Connection,
    DeadLetters,
    Delivery,
    Health,
    Settlement,
    Source,
    Subscription,
)
from .ending import to_its_end
from .errors import (
    Blocked,
    BrokerClosed,
    BrokerRefused,
    LeaseLost,
    PublishError,
    Rejected,
    SettleError,
    TooLarge,
    Unroutable,
    Unsupported,
)
from .message import Message, Outgoing
from .outcome import ACK, RELEASE, Ack, DeadLetter, Drop, Retry

__all__ = ["MemoryBroker"]

_stores: WeakValueDictionary[str, Store] = WeakValueDictionary()


class MemoryBroker(Broker):
    """A broker in this process: ``memory://`` has its messages for itself, ``memory://name`` shares them with every
    broker of that name in the process.

    - `max_messages`, `max_bytes`: what the store holds at most, counted for each group: messages, and bytes of bodies
      and header values. When it is full, a publish waits for room.
    - `publish_timeout`: how long it waits, in seconds; then the message is answered with `Blocked`, and so are those
      behind it in the same call, so that a repeat keeps their order.
    - `max_body`: the largest body, in bytes; a larger one is answered with `TooLarge`.

    A group stays registered, and its messages are kept, while the store lives. Raises `ValueError` for a URL or a
    limit that makes no sense.
    """

    capabilities = Capabilities(
        settlement="immediate",
        retry=True,
        # asyncio rounds a timer up to its clock's resolution, and a busy loop adds its own latency.
        delay=0.01,
        release=True,
        attempts="process",
        dead_letter=True,
        ordered_by=frozenset({"key"}),
        priorities=True,
        replies=True,
        max_body=16 * 1024 * 1024,
    )

    def __init__(
        self,
        url: str = "memory://",
        *,
        max_messages: int = 100_000,
        max_bytes: int = 256 * 1024 * 1024,
        max_body: int = 16 * 1024 * 1024,
        publish_timeout: float = 30.0,
    ) -> None:
        super().__init__(url)
        scheme, separator, name = url.partition("://")
        if scheme != "memory" or not separator or "?" in name:
            raise ValueError(f"{self.describe()!r}: a memory broker's URL is memory:// or memory://name")
        for option, value in (("max_messages", max_messages), ("max_bytes", max_bytes), ("max_body", max_body)):
            if value < 1:
                raise ValueError(f"{option}={value}: at least 1 is needed")
        if publish_timeout < 0:
            raise ValueError(f"publish_timeout={publish_timeout}: seconds, zero or more")
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.max_body = max_body
        self.publish_timeout = publish_timeout
        self._store = _stores.setdefault(name, Store()) if name else Store()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """A connection to this broker's store. Raises `BrokerRefused` when another event loop uses the store."""
        self._store.enter()
        connection = MemoryConnection(self, self._store)
        try:
            yield connection
        finally:
            await to_its_end(connection.close())
            self._store.leave()

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        return msgspec.structs.replace(self.capabilities, max_body=self.max_body)

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        yield from super().mistakes(subscription)
        if not subscription.group:
            yield "a group needs a name"


class MemoryDelivery(Delivery, gc=False, kw_only=True):
    """`tag` is this delivery's own number: the next delivery of the same message has another."""

    tag: int
    stored: Stored


class MemoryConnection(Connection):
    """See `streamfw.broker.Connection`."""

    def __init__(self, broker: MemoryBroker, store: Store) -> None:
        self._broker = broker
        self._store = store
        self._sources: set[MemorySource] = set()
        self.closed = False

    def require_open(self) -> None:
        if self.closed:
            raise BrokerClosed("this memory broker's connection was closed")

    async def open(self, subscription: Subscription) -> Source:
        self.require_open()
        for mistake in self._broker.mistakes(subscription):
            raise BrokerRefused(f"{subscription!r}: {mistake}")
        if subscription.ordered_by == "partition":
            raise Unsupported(f"{subscription!r}: a memory broker has no partitions to order by")
        source = MemorySource(
            self, self._store, self._store.register(subscription.name, subscription.group), subscription
        )
        self._sources.add(source)
        return source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        self.require_open()
        answers: list[PublishError | None] = []
        stamp = now()
        deadline = asyncio.get_running_loop().time() + self._broker.publish_timeout
        full = False
        store = self._store
        for message in messages:
            error = self._refuse(message)
            if error is None:
                size = _size(message)
                if not full and not store.turn.locked() and self._has_room(message, size):
                    store.add(message, size, stamp)
                elif full or not await self._store_in_turn(message, size, stamp, deadline):
                    full = True
                    error = _refusal(Blocked, message, f"{self._broker.describe()} is full ({self._fill()})")
            answers.append(error)
        return answers if any(answers) else ()

    async def withdraw(self, name: str, group: str) -> int:
        self.require_open()
        return self._store.withdraw(name, group, leave=not name.startswith(REPLY_PREFIX))

    def _refuse(self, message: Outgoing) -> PublishError | None:
        """What no waiting would change."""
        if not message.kept and not self._store.has_groups(message.name):
            return _refusal(Unroutable, message, "nobody has subscribed to it")
        body: object = message.body
        if not isinstance(body, bytes):
            return _refusal(Rejected, message, f"a body is bytes, not {type(body).__name__}")
        if len(body) > self._broker.max_body:
            limit = f"{len(body)} bytes, max_body={self._broker.max_body}"
            return _refusal(TooLarge, message, f"the body is too large for {self._broker.describe()}: {limit}")
        return None

    async def _store_in_turn(self, message: Outgoing, size: int, stamp: float, deadline: float) -> bool:
        """Wait for room, behind the publishers that wait already; False when there was none by `deadline`."""
        store = self._store
        try:
            async with asyncio.timeout_at(deadline), store.turn:
                while not self._has_room(message, size):
                    await store.until_freed()
                    self.require_open()
                store.add(message, size, stamp)
        except TimeoutError:
            return False
        return True

    def _has_room(self, message: Outgoing, size: int) -> bool:
        """An empty store takes any message, so that none waits for room that can never be."""
        store = self._store
        copies = len(store.queues(message.name))
        fits = store.count + copies <= self._broker.max_messages
        return (fits and store.bytes + size * copies <= self._broker.max_bytes) or not store.count

    def _fill(self) -> str:
        broker, store = self._broker, self._store
        return f"{store.count} of {broker.max_messages} messages, {store.bytes} of {broker.max_bytes} bytes"

    def forget(self, source: MemorySource) -> None:
        self._sources.discard(source)

    async def check(self) -> Health:
        self.require_open()
        return Health(True, self._fill())

    async def dead_letters(self, name: str) -> DeadLetters:
        self.require_open()
        return MemoryDeadLetters(self, self._store, name)

    async def close(self) -> None:
        """Close what it opened; from now on every handle raises `BrokerClosed`. Twice is once."""
        for source in list(self._sources):
            await source.close()
        self.closed = True
        self._store.nudge()


class MemorySource(Source):
    """See `streamfw.broker.Source`. `_out` holds what is handed out, by the delivery's tag."""

    def __init__(self, connection: MemoryConnection, store: Store, queue: Queue, subscription: Subscription) -> None:
        self._connection = connection
        self._store = store
        self._queue = queue
        self._dead_letter = subscription.dead_letter
        self._ordered = subscription.ordered_by == "key"
        self._out: dict[int, MemoryDelivery] = {}
        self._stopped = False
        self._closed = False
        queue.join(self, self._ordered)

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        queue = self._queue
        try:
            while True:
                self._connection.require_open()
                if self._stopped:
                    return ()
                if queue.serves(self) and (taken := queue.take(limit, max_bytes)):
                    return self._hand_out(taken)
                await queue.wait(self)
        finally:
            # One wake is one chance to take: who leaves something, or was stopped meanwhile, passes it on.
            queue.wake()

    def _hand_out(self, taken: list[Stored]) -> list[MemoryDelivery]:
        ordered, first = self._ordered, self._store.tag
        last = self._store.tag = first + len(taken)
        deliveries = [
            MemoryDelivery(
                name=s.name, body=s.body, message_id=s.message_id, key=s.key, attempt=s.attempt + 1,
                timestamp=s.timestamp, raw_headers=s.headers, lane=s.key if ordered else None, tag=tag, stored=s,
            )
            for tag, s in enumerate(taken, first)
        ]  # fmt: skip
        self._out.update(zip(range(first, last), deliveries, strict=True))
        return deliveries

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        self._connection.require_open()
        pop = self._out.pop
        count = size = 0
        odd: list[Settlement] = []
        errors: list[SettleError] = []
        for settlement in settlements:
            if settlement.outcome is not ACK:
                odd.append(settlement)
                continue
            # Only a source's own deliveries come back to it, and the tag is unique in the whole store.
            delivery = pop(settlement.delivery.tag, None)  # type: ignore[attr-defined]
            if delivery is None:
                errors.append(_lost(settlement.delivery))
            else:
                count += 1
                size += delivery.stored.size
        if count:
            self._store.free(count, size)
        if odd:
            self._settle_odd(odd, errors)
        return errors

    def _settle_odd(self, settlements: Sequence[Settlement], errors: list[SettleError]) -> None:
        """Whatever is not the constant `ACK`."""
        for settlement in settlements:
            outcome = settlement.outcome
            if not isinstance(outcome, Ack | Retry | Drop | DeadLetter) and outcome is not RELEASE:
                raise Unsupported(f"a memory broker cannot settle with {outcome!r}")
            delivery = self._out.pop(settlement.delivery.tag, None)  # type: ignore[attr-defined]
            if delivery is None:
                errors.append(_lost(settlement.delivery))
                continue
            stored = delivery.stored
            if isinstance(outcome, Retry):
                stored.attempt += 1
                self._queue.put_back(stored, self._store.clock() + outcome.after if outcome.after else None)
            elif outcome is RELEASE:
                self._queue.put_back(stored)
            elif isinstance(outcome, DeadLetter) and self._dead_letter is not None:
                # The delivery's own count: the runtime counts on in it where it tries again in place.
                self._store.bury(stored, delivery.attempt, self._queue, self._dead_letter, outcome)
            else:
                self._store.free(1, stored.size)

    async def stop(self) -> None:
        self._stopped = True
        self._queue.interrupt(self)

    async def flush(self, deadline: float) -> None:
        self._connection.require_open()  # and that is all: `settle` has done it

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = self._stopped = True
        out, self._out = self._out, {}
        for delivery in out.values():
            delivery.lost = True
            self._queue.put_back(delivery.stored)
        self._queue.leave(self)
        self._connection.forget(self)

    def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        return Health(True, "" if self._queue.serves(self) else "standing by: another source of this group is ordered")


class MemoryDeadLetters(DeadLetters):
    """The messages that wait at a name, each once although every group has its copy. What a subscriber holds at the
    moment is neither seen nor touched."""

    def __init__(self, connection: MemoryConnection, store: Store, name: str) -> None:
        self._connection = connection
        self._store = store
        self._name = name

    async def list(self, limit: int = 100) -> Sequence[Message]:
        return as_messages(self._found(None)[:limit])

    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        back = [letter for letter in self._found(message_ids) if self._store.unbury(letter)]
        self._remove(back)
        return len(back)

    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        found = self._found(message_ids)
        self._remove(found)
        return len(found)

    def _found(self, message_ids: Sequence[str] | None) -> Sequence[Stored]:
        self._connection.require_open()
        wanted = None if message_ids is None else frozenset(message_ids)
        by_seq = {
            stored.seq: stored
            for queue in self._store.topics.get(self._name, {}).values()
            for stored in queue.waiting_messages()
            if wanted is None or stored.message_id in wanted
        }
        return [by_seq[seq] for seq in sorted(by_seq)]

    def _remove(self, letters: Sequence[Stored]) -> None:
        seqs = {letter.seq for letter in letters}
        for queue in self._store.topics.get(self._name, {}).values():
            gone = queue.remove(seqs)
            self._store.free(len(gone), sum(stored.size for stored in gone))


def _size(message: Outgoing) -> int:
    """What a message takes of the room, in bytes."""
    size = len(message.body)
    if message.headers.pairs:
        size += sum(len(value) for _, value in message.headers.pairs if value)
    return size


def _lost(delivery: Delivery) -> LeaseLost:
    return LeaseLost(delivery, "settled already, or given back when its source closed")


def _refusal(kind: type[PublishError], message: Outgoing, why: str) -> PublishError:
    return kind(why, name=message.name, message_id=message.message_id)
