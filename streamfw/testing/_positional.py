"""A log with partitions, in process: the synthetic broker of the positional kind."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Delivery, Health, Settlement, Source, Subscription
from streamfw.errors import (
    BrokerClosed,
    BrokerRefused,
    BrokerUnavailable,
    PartitionRevoked,
    PublishError,
    Rejected,
    SettleError,
    StaleDelivery,
    TooLarge,
    Unsupported,
)
from streamfw.message import Outgoing
from streamfw.outcome import Ack, Drop
from streamfw.positions import Watermark

from ._positional_group import Group

MARKER_EVERY = 8
"""Each eighth offset of a partition is a marker that nobody is given: logs have gaps, and consumers must pass them."""


class PositionalBroker(Broker):
    """A log with `partitions` partitions a topic, kept whole; groups have a committed position in each.

    A key belongs to one partition, and a partition to one source of a group. A source that joins or leaves makes
    partitions move: their owner holds its pump, lets what runs end for at most `drain` seconds, commits, and drops
    what is queued of them. A position is committed when nothing is open before the end, and each `commit_every`
    settlements. It has no retry, no release, no delay and no dead letters of its own.
    """

    capabilities = Capabilities(
        settlement="positional",
        ordered_by=frozenset({"key", "partition"}),
        prefetch=500,
        max_body=1024 * 1024,
    )

    def __init__(
        self, url: str = "positional://", *, partitions: int = 4, commit_every: int = 100, drain: float = 1.0
    ) -> None:
        super().__init__(url)
        if partitions < 1 or commit_every < 1 or drain < 0:
            raise ValueError(f"{partitions=}, {commit_every=}: at least 1; {drain=}: seconds, zero or more")
        self.partitions = partitions
        self.commit_every = commit_every
        self.drain = drain
        self._logs: dict[str, list[list[Record | None]]] = {}
        self._groups: dict[tuple[str, str], Group] = {}
        self._turn = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        connection = PositionalConnection(self)
        try:
            yield connection
        finally:
            await connection.close()

    # What a test does to it

    async def revoke(self, name: str, group: str = "default", *, abrupt: bool = False) -> None:
        """Take every partition away from its owner and give it to the next member, or to the only one again.

        With `abrupt` nobody is asked, as after a session that timed out: nothing is held, drained or committed.
        """
        await self.group(name, group).rebalance(rotate=True, abrupt=abrupt)

    async def cut(self) -> None:
        """End every session: sources lose their partitions, and their `fetch` raises until they are reopened."""
        for group in self._groups.values():
            for member in list(group.members):
                member.lose_session()
            await group.rebalance()

    def committed(self, name: str, group: str = "default") -> dict[int, int]:
        """The committed position of each partition that has one."""
        return dict(self.group(name, group).committed)

    # The server's side

    def log(self, name: str) -> list[list[Record | None]]:
        if name not in self._logs:
            self._logs[name] = [[] for _ in range(self.partitions)]
        return self._logs[name]

    def group(self, name: str, group: str) -> Group:
        key = (name, group)
        if key not in self._groups:
            self._groups[key] = Group(self.partitions, self.drain)
        return self._groups[key]

    def append(self, message: Outgoing, stamp: float) -> None:
        if message.key is None:
            self._turn += 1
            partition = self._turn % self.partitions
        else:
            partition = zlib.crc32(message.key.encode(errors="surrogatepass")) % self.partitions
        log = self.log(message.name)[partition]
        log.append(Record(message, stamp))
        if len(log) % MARKER_EVERY == MARKER_EVERY - 1:
            log.append(None)
        for (name, _), group in self._groups.items():
            if name == message.name and (owner := group.owner.get(partition)) is not None:
                owner.wake()


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message of the log; its offset is its index."""

    message: Outgoing
    timestamp: float


class PositionalConnection(Connection):
    """See `streamfw.broker.Connection`."""

    def __init__(self, broker: PositionalBroker) -> None:
        self._broker = broker
        self._sources: list[PositionalSource] = []
        self.closed = False

    def require_open(self) -> None:
        if self.closed:
            raise BrokerClosed("this connection to the positional broker was closed")

    async def open(self, subscription: Subscription) -> Source:
        self.require_open()
        for mistake in self._broker.mistakes(subscription):
            raise BrokerRefused(f"{subscription!r}: {mistake}")
        source = PositionalSource(self, self._broker, subscription)
        self._sources.append(source)
        await source.reopen()
        return source

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        self.require_open()
        answers = [self._refuse(message) for message in messages]
        stamp = time.time()
        for message, error in zip(messages, answers, strict=True):
            if error is None:
                self._broker.append(message, stamp)
        return answers

    def _refuse(self, message: Outgoing) -> PublishError | None:
        limit = self._broker.capabilities.max_body
        if limit is not None and len(message.body) > limit:
            why = f"the body has {len(message.body)} bytes, and the limit is {limit}"
            return TooLarge(why, name=message.name, message_id=message.message_id)
        if message.delay > 0:
            why = f"delay={message.delay}: a log has no delayed publishing"
            return Rejected(why, name=message.name, message_id=message.message_id)
        return None

    async def check(self) -> Health:
        self.require_open()
        return Health(True)

    async def close(self) -> None:
        for source in self._sources:
            await source.close()
        self.closed = True


class Assignment:
    """One partition for one epoch: from being given it to losing it. A delivery refers to its own, so a late
    settlement sees at once that its epoch is over."""

    __slots__ = ("live", "mark", "partition")

    def __init__(self, partition: int, start: int) -> None:
        self.partition = partition
        self.mark = Watermark(start)
        self.live = True


class PositionalDelivery(Delivery, gc=False, kw_only=True):
    """With its place in the log."""

    assignment: Assignment
    offset: int


class PositionalSource(Source):
    """See `streamfw.broker.Source`."""

    def __init__(self, connection: PositionalConnection, broker: PositionalBroker, subscription: Subscription) -> None:
        self._connection = connection
        self._broker = broker
        self._group = broker.group(subscription.name, subscription.group)
        self._log = broker.log(subscription.name)
        self._subscription = subscription
        self._assigned: dict[int, Assignment] = {}
        self._out: dict[Assignment, dict[int, PositionalDelivery]] = {}
        self._settled = 0  # since the last commit
        self._waiter: asyncio.Future[None] | None = None
        self._stopped = self._closed = self._session_lost = False

    async def reopen(self) -> None:
        self._connection.require_open()
        self._session_lost = False
        if self not in self._group.members:
            self._group.members.append(self)
        await self._group.rebalance()

    # Reading

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        while True:
            self._connection.require_open()
            if self._stopped:
                return ()
            if self._session_lost:
                raise BrokerUnavailable(f"{self._subscription!r}: the session in the consumer group is over")
            if deliveries := self._read(limit, max_bytes):
                return deliveries
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _read(self, limit: int, max_bytes: int) -> list[PositionalDelivery]:
        """Whole partitions in turn: the one that was read first is read last next time, so that none starves."""
        deliveries: list[PositionalDelivery] = []
        for partition in list(self._assigned):
            assignment = self._assigned.pop(partition)
            self._assigned[partition] = assignment
            max_bytes -= self._read_partition(assignment, deliveries, limit, max_bytes)
            if len(deliveries) >= limit or max_bytes <= 0:
                break
        return deliveries

    def _read_partition(
        self, assignment: Assignment, deliveries: list[PositionalDelivery], limit: int, max_bytes: int
    ) -> int:
        """Append what there is; return its bytes. Each position is held as it is read, with nothing in between."""
        log, mark, size = self._log[assignment.partition], assignment.mark, 0
        out = self._out[assignment]
        while mark.end < len(log) and len(deliveries) < limit:
            record = log[mark.end]
            if record is None:
                mark.skip(mark.end + 1)
                continue
            if deliveries and size + len(record.message.body) > max_bytes:
                break
            size += len(record.message.body)
            offset = mark.end
            mark.hold(offset)
            out[offset] = self._delivery(record, assignment, offset)
            deliveries.append(out[offset])
        return size

    def _delivery(self, record: Record, assignment: Assignment, offset: int) -> PositionalDelivery:
        message = record.message
        lanes = {"key": message.key, "partition": assignment.partition, None: None}
        return PositionalDelivery(
            name=message.name,
            body=message.body,
            message_id=message.message_id,
            key=message.key,
            timestamp=record.timestamp,
            raw_headers=message.headers,
            lane=lanes[self._subscription.ordered_by],
            assignment=assignment,
            offset=offset,
        )

    def wake(self) -> None:
        """There may be something to read, or a reason not to wait."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Settling

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        self._connection.require_open()
        for settlement in settlements:
            if not isinstance(settlement.outcome, Ack | Drop):
                raise Unsupported(f"a log cannot settle with {settlement.outcome!r}: it only moves on")
        errors = [error for settlement in settlements if (error := self._resolve(settlement.delivery)) is not None]
        for assignment in self._assigned.values():
            if self._settled >= self._broker.commit_every or not assignment.mark.open:
                self._commit(assignment)
        if self._settled >= self._broker.commit_every:
            self._settled = 0
        return errors

    def _resolve(self, delivery: Delivery) -> SettleError | None:
        assert isinstance(delivery, PositionalDelivery)
        assignment = delivery.assignment
        if not assignment.live:
            return PartitionRevoked(delivery, f"partition {assignment.partition} was taken away before it was settled")
        if not assignment.mark.resolve(delivery.offset):
            return StaleDelivery(delivery, "settled already")
        del self._out[assignment][delivery.offset]
        self._settled += 1
        return None

    def _commit(self, assignment: Assignment) -> None:
        """Never lower than before, and only by the owner: `give_up` commits before the partition moves."""
        committed = self._group.committed
        committed[assignment.partition] = max(assignment.mark.position, committed.get(assignment.partition, 0))

    async def flush(self, deadline: float) -> None:
        self._connection.require_open()
        for assignment in self._assigned.values():
            self._commit(assignment)

    # Partitions come and go

    def take_on(self, partition: int, start: int) -> None:
        """`partition` is ours, from position `start` on."""
        assignment = Assignment(partition, start)
        self._assigned[partition] = assignment
        self._out[assignment] = {}
        self.wake()

    async def give_up(self, partitions: Iterable[int], drain: float, abrupt: bool) -> None:
        """Those of `partitions` that are ours move away: hold, let what runs end, commit, drop what is queued."""
        pump = self._subscription.pump
        if not abrupt:
            pump.hold()
            await pump.quiesce(drain, self.holds_back)
        for partition in partitions:
            self._lose(partition, commit=not abrupt)
        if not abrupt:
            pump.release(drop=lambda delivery: delivery.lost)

    def holds_back(self, delivery: Delivery) -> bool:
        assert isinstance(delivery, PositionalDelivery)
        return delivery.assignment.live and delivery.assignment.mark.behind(delivery.offset)

    def _lose(self, partition: int, commit: bool) -> None:
        assignment = self._assigned.pop(partition, None)
        if assignment is None:
            return
        if commit:
            self._commit(assignment)
        assignment.live = False
        for delivery in self._out.pop(assignment).values():
            delivery.lost = True

    def lose_session(self) -> None:
        """The group believes us dead: nothing can be committed any more."""
        self._session_lost = True
        self._leave(commit=False)

    def _leave(self, commit: bool) -> None:
        if self in self._group.members:
            self._group.members.remove(self)
        for partition in list(self._assigned):
            self._lose(partition, commit)
        for partition in [p for p, owner in self._group.owner.items() if owner is self]:
            del self._group.owner[partition]
        self.wake()

    # The end

    async def stop(self) -> None:
        self._stopped = True
        self.wake()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = self._stopped = True
        self._leave(commit=True)
        await self._group.rebalance()

    def health(self) -> Health:
        if self._closed or self._session_lost:
            return Health(False, "closed" if self._closed else "the session in the consumer group is over")
        return Health(True, f"partitions {sorted(self._assigned)}")
