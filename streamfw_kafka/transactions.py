"""Kafka to Kafka, exactly once: what a handler publishes and the position behind its message are committed as one.

Theory of operation
    Each partition has a transactional producer, with an id made of group, topic and partition. Whoever takes the
    partition over starts its producer *before* it reads the committed offset: the server then ends what the owner
    before left open, and refuses him from then on (KIP-98). So a transaction belongs to an owner, without a word about
    the group's generation.

    A unit is one message, or one batch, of one partition. The lane of a transactional subscription is its partition,
    so units of a partition follow each other, and a position may be committed when nothing is open before it. What ends
    otherwise (a dead letter, a drop) is committed with the others, outside.

    A producer is replaced after it failed. To start one refuses all before it, also a rightful owner's, if we are the
    one who was taken for dead. So its first act is to read the committed offset: if that is not what we left, others
    have been there, and the partition is not ours any more. The same answers what became of a commit without an answer.

The server answers a commit before the group has its offset, so committed offsets are asked for as stable ones only: a
rebalance in between, which kept our producer, would read the one before and handle the unit again.

Of the offsets of a transaction and those of a commit beside it, the server keeps what it got last, and it gets those of
a transaction before it ends. So nothing else is committed of a partition while its transaction is committing: what was
settled before (or a marker in the log that was read past) would bring the position back behind the transaction.

aiokafka sends offsets before the records they stand for (#1004), so every record is acknowledged before the offsets are
added.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, KafkaError, MessageSizeTooLargeError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from streamfw.broker import Connection, Settlement, UnitOfWork
from streamfw.errors import (
    BrokerError,
    BrokerUnavailable,
    PartitionRevoked,
    PublishError,
    Rejected,
    TooLarge,
    Unavailable,
)
from streamfw.message import Outgoing
from streamfw.outcome import Ack, Outcome

from .admin import Topics
from .assignment import UNKNOWN, KafkaDelivery, Part
from .errors import translated
from .publish import kind_of, record_of
from .settings import Settings, client_arguments

if TYPE_CHECKING:
    from .source import KafkaSource

__all__ = ["Transactions", "Unit"]

log = logging.getLogger("streamfw.kafka")

START = 15.0  # seconds for a producer to start: the server may first have to end what another left open
EARLIER = 60.0  # seconds to wait for what is before a unit and not settled yet: dead letters on their way
OVERHEAD = 64 * 1024  # bytes of a record besides its body: key and headers
CLOSE = 2.0


class Transactions:
    """The producers of one source's partitions. `prefix` begins their transactional ids."""

    def __init__(self, owner: Connection, settings: Settings, topics: Topics, group: str, prefix: str) -> None:
        self.owner, self.topics, self.group = owner, topics, group
        self._settings, self._prefix = settings, prefix
        self._producers: dict[TopicPartition, AIOKafkaProducer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def fence(self, assigned: Collection[TopicPartition]) -> None:
        """These are ours: refuse everybody else who had them, and let go of all others."""
        for tp in [tp for tp in self._producers if tp not in assigned]:
            self.discard(tp)
        missing = [tp for tp in assigned if tp not in self._producers]
        await asyncio.gather(*(self._start(tp) for tp in missing))

    async def _start(self, tp: TopicPartition) -> AIOKafkaProducer:
        settings = self._settings
        producer = AIOKafkaProducer(
            transactional_id=f"{self._prefix}-{tp.topic}-{tp.partition}",
            compression_type=None if settings.compression == "none" else settings.compression,
            max_request_size=settings.max_body + OVERHEAD,
            **client_arguments(settings),
        )
        what = f"starting the transactions of {tp.topic}-{tp.partition}"
        try:
            async with asyncio.timeout(START):
                await producer.start()
        except (KafkaError, OSError, TimeoutError) as error:
            self._end(producer)
            raise translated(error, what) from error
        except BaseException:
            self._end(producer)
            raise
        self.discard(tp)  # what else was just starting: the server refuses it since ours did
        self._producers[tp] = producer
        return producer

    async def producer(self, source: KafkaSource, part: Part) -> AIOKafkaProducer:
        """The producer of a partition; a new one where the last one failed, if the partition is still ours."""
        producer = self._producers.get(part.tp)
        if producer is None or producer._sender.sender_task.done():
            self.discard(part.tp)
            producer = await self._start(part.tp)
            left = part.committed
            if not part.is_still_ours(await self.committed(source, part), left):
                self.discard(part.tp)
                raise BrokerUnavailable(f"{part!r}: somebody else has committed; it is not ours any more")
        return producer

    async def committed(self, source: KafkaSource, part: Part) -> int:
        """The committed offset, as nobody can change it any more but us: asked after our producer has started."""
        found = await source.group.consumer.committed_offsets([part.tp], stable=True)
        return found.get(part.tp, UNKNOWN)

    def discard(self, tp: TopicPartition) -> None:
        """This producer is not used any more. The server ends what it left open when the next one starts."""
        producer = self._producers.pop(tp, None)
        if producer is not None:
            self._end(producer)

    def _end(self, producer: AIOKafkaProducer) -> None:
        task = asyncio.get_running_loop().create_task(_stopped(producer))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End them all, once nobody starts any more."""
        for tp in list(self._producers):
            self.discard(tp)
        if self._ending:
            await asyncio.wait(self._ending, timeout=2 * CLOSE)

    # -- publishing

    async def publish(self, producer: AIOKafkaProducer, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """An answer for each message, when all are acknowledged: visible they become with the commit."""
        sent = [await self._sent(producer, message) for message in messages]
        return [answer if not isinstance(answer, asyncio.Future) else await _acknowledged(answer, message)
                for answer, message in zip(sent, messages, strict=True)]  # fmt: skip

    async def _sent(self, producer: AIOKafkaProducer, message: Outgoing) -> PublishError | asyncio.Future[Any]:
        about = {"name": message.name, "message_id": message.message_id}
        try:
            key, value, headers = record_of(message, self._settings.max_body, moves=False)
            await self.topics.ensure(message.name)
            future: asyncio.Future[Any] = await producer.send(message.name, value, key=key, headers=headers)
        except MessageSizeTooLargeError as error:
            text = f"the record is too large: {error}"
            return TooLarge(text, name=message.name, message_id=message.message_id)
        except PublishError as error:
            return error.with_traceback(None)
        except BrokerError as error:
            return kind_of(error)(str(error), **about)
        except (KafkaError, TimeoutError) as error:
            return Unavailable(str(translated(error, f"publishing to {message.name!r}")), **about)
        return future


async def _acknowledged(future: asyncio.Future[Any], message: Outgoing) -> PublishError | None:
    try:
        await future
    except (KafkaError, TimeoutError) as error:
        # Not stored to anybody who reads what is committed: the transaction cannot be committed after this.
        said = str(translated(error, f"publishing to {message.name!r}"))
        return Unavailable(said, name=message.name, message_id=message.message_id)
    return None


async def _stopped(producer: AIOKafkaProducer) -> None:
    try:
        async with asyncio.timeout(CLOSE):
            await producer.stop()
    except Exception as error:  # it was given up already
        log.debug("a transactional producer did not stop: %r", error)
    finally:
        await producer.client.close()
        # Nobody waits for the end of a transaction that was given up: asyncio would complain of its error.
        waiter = producer._txn_manager and producer._txn_manager._transaction_waiter
        if waiter is not None and waiter.done() and not waiter.cancelled():
            waiter.exception()


class Unit(UnitOfWork):
    """The transaction of a message or a batch, on the producer of their partition (its `connection`)."""

    publishes = True
    connection: AIOKafkaProducer

    def __init__(self, source: KafkaSource, transactions: Transactions, deliveries: Sequence[KafkaDelivery]) -> None:
        self._source, self._transactions, self._deliveries = source, transactions, deliveries
        self._part = deliveries[0].part
        self._open = False

    def belongs_to(self, connection: Connection) -> bool:
        """See `UnitOfWork.belongs_to`."""
        return connection is self._transactions.owner

    async def __aenter__(self) -> Unit:
        """Begin. Raises `PartitionRevoked`, or `BrokerError` when there is no producer."""
        self._still_ours()
        try:
            self.connection = await self._transactions.producer(self._source, self._part)
            await self.connection.begin_transaction()
        except (KafkaError, IllegalOperation, AssertionError) as error:
            raise self._broken(error, "beginning a transaction") from error
        except BrokerUnavailable as error:
            self._still_ours()
            self._source.group.fail(error, "")  # whoever is right: joining again will tell
            raise
        self._open = True
        return self

    def _still_ours(self) -> None:
        if not self._part.live:
            for delivery in self._deliveries:
                delivery.lost = True
            where = f"{self._part.tp.topic}-{self._part.tp.partition}"
            raise PartitionRevoked(self._deliveries[0], f"partition {where} was taken away from its transaction")

    def _broken(self, error: BaseException, what: str) -> BrokerError:
        """The producer is of no use any more: its next transaction gets a new one."""
        self._open = False
        self._transactions.discard(self._part.tp)
        self._still_ours()
        if isinstance(error, ProducerFenced):
            return BrokerUnavailable(f"{self._part!r}: {what}: the server has ended it (was it open for too long?)")
        return translated(error, what) if isinstance(error, KafkaError) else BrokerUnavailable(f"{what}: {error!r}")

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """See `UnitOfWork.publish`."""
        if not self._open:
            closed = "the transaction of the handler that publishes this is over"
            return [Rejected(closed, name=m.name, message_id=m.message_id) for m in messages]
        return await self._transactions.publish(self.connection, messages)

    async def finish(self, outcome: Outcome) -> None:
        """See `UnitOfWork.finish`. Raises `PartitionRevoked`, or `BrokerError` when nothing was committed."""
        if not isinstance(outcome, Ack):
            await self._abort()
            errors = await self._source.settle([Settlement(delivery, outcome) for delivery in self._deliveries])
            if errors:
                raise errors[0]
            return
        part, position = self._part, self._deliveries[-1].offset + 1
        await self._wait_for_earlier(position)
        part.bound = True
        try:
            while part.asked:  # noqa: ASYNC110 - rarely, for a moment, and nobody else wants to know
                await asyncio.sleep(0.001)
            await self._commit(part, position)
        finally:
            part.bound = False

    async def _commit(self, part: Part, position: int) -> None:
        self._still_ours()
        try:
            offsets = {part.tp: OffsetAndMetadata(position, part.facts(done=len(self._deliveries)))}
            await self.connection.send_offsets_to_transaction(offsets, self._transactions.group)
            await self.connection.commit_transaction()
        except (KafkaError, IllegalOperation, AssertionError) as error:
            if not await self._was_committed(error, position):
                raise self._broken(error, "committing a transaction") from error
        self._open = False
        part.committed = part.sent = max(part.committed, position)
        for delivery in self._deliveries:
            part.mark.resolve(delivery.offset)

    async def _wait_for_earlier(self, position: int) -> None:
        """What is before it, and no part of it, is a dead letter on its way: committing past it would lose it."""
        mark, mine = self._part.mark, len(self._deliveries)
        deadline = asyncio.get_running_loop().time() + EARLIER
        while self._part.live and mark.open_below(position) > mine:
            if asyncio.get_running_loop().time() > deadline:
                await self._abort()
                raise BrokerUnavailable(f"{self._part!r}: offset {mark.position} is not settled, and is before this")
            await asyncio.sleep(0.005)

    async def _was_committed(self, error: BaseException, position: int) -> bool:
        """A commit failed, or nobody knows: start a new producer, which ends it one way or the other, and look."""
        self._transactions.discard(self._part.tp)
        if isinstance(error, IllegalOperation | AssertionError):
            return False  # it was never asked for
        self._still_ours()
        await self._transactions._start(self._part.tp)
        left = self._part.committed
        committed = await self._transactions.committed(self._source, self._part)
        if committed != position and not self._part.is_still_ours(committed, left):
            self._transactions.discard(self._part.tp)
        return committed == position

    async def _abort(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            await self.connection.abort_transaction()
        except (KafkaError, IllegalOperation, AssertionError):
            self._transactions.discard(self._part.tp)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaving without `finish` aborts."""
        await self._abort()
