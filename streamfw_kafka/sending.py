"""Records on their way to the leaders of their partitions: idempotent, in order, with a definite end for each.

Theory of operation
    Each partition has a `Lane`: a queue of batches. Records are appended to the last batch for as long as it is open;
    it closes when it is full, or when it is its turn. Each node has one task, which takes the first batch of every lane
    that is led there, sends them in one request, and takes the next ones when the answer is in. So what comes while a
    request is out goes into the next one, and a partition has one batch out at most: its records keep their order,
    whatever is repeated.

    A batch carries the producer's id and a sequence number (`Identity`), by which the server knows one that it has
    already. So a batch whose answer did not come is sent again, the same bytes, until it is answered or its time is
    over; from its first try on without an answer it is *doubtful*: nobody knows whether it is stored.

    The server wants the numbers of a partition without a gap. A batch that was surely not stored gives its number back;
    where that is not sure, or the server does not know our numbers any more, all goes on under a new producer id, whose
    numbers begin at 0.

    A batch that is refused for what is in it is sent again in halves until the bad record stands alone.

aiokafka's own producer tries a batch for ever once it is idempotent, does not say whether it was ever sent, and leaves
a gap in the numbers when one is refused, after which the partition takes nothing more. Its record builder, its
requests and its connections are what is used here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiokafka.errors import ClusterAuthorizationFailedError, TopicAuthorizationFailedError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder, _DefaultRecordBatchBuilderPy

from streamfw.ending import ended
from streamfw.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    OutcomeUnknown,
    PublishError,
    Rejected,
    Unavailable,
    Unroutable,
)

from .errors import DRIVER_ERRORS, concerns_message, response_error, translated
from .lanes import Batch, Entry, Identity, Lane, Route
from .nodes import Nodes
from .settings import Compression, Settings
from .wire import Pairs, encoded, murmur2, value_of

__all__ = ["Sending"]

log = logging.getLogger("streamfw.kafka")

_REQUEST_BYTES: Final = 8 * 1024 * 1024
_USE: Final = "publishing"
_FOR_EVER: Final = 2**31 - 1
_NO_LIMIT: Final = 2**31 - 1
_CODECS: Final[dict[Compression, int]] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

# Error codes of a produce response (protocol guide, "Error Codes").
_STORED: Final = frozenset({0, 46})  # none; DUPLICATE_SEQUENCE_NUMBER: stored by an earlier try
# Surely not stored: CORRUPT_MESSAGE, UNKNOWN_TOPIC_OR_PARTITION, NOT_ENOUGH_REPLICAS.
_NOT_YET: Final = frozenset({2, 3, 19})
# Answered after the leader may have written it: unknown, a leader that moves, time-outs, too few replicas afterwards,
# disk errors, epochs and listeners in change.
_DOUBTFUL: Final = frozenset({-1, 5, 6, 7, 8, 9, 13, 14, 15, 16, 20, 41, 56, 72, 74, 75, 78, 84, 100})
# OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, UNKNOWN_PRODUCER_ID,
# PRODUCER_FENCED: the server does not know our numbers.
_IDENTITY: Final = frozenset({45, 47, 49, 59, 90})
_TOO_LARGE: Final = frozenset({10, 18})  # MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE
_RIGHTS: Final = frozenset({TopicAuthorizationFailedError.errno, ClusterAuthorizationFailedError.errno})


class _Node:
    """A node that leads something, and its task."""

    __slots__ = ("number", "ready", "task", "waiter")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready: deque[Lane] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None]


class Sending:
    """Sends for one connection. `stale` is called with a route whose leaders should be asked for again, `too_large`
    with one and a record that its topic does not take; the latter answers for it."""

    def __init__(
        self,
        nodes: Nodes,
        settings: Settings,
        stale: Callable[[Route], None],
        too_large: Callable[[Route, Entry, BrokerError], None],
    ) -> None:
        self._nodes, self._settings = nodes, settings
        self._stale, self._too_large = stale, too_large
        self._loop = asyncio.get_running_loop()
        # Of a batch: the format's version, the codec, not transactional, and no producer yet.
        self._form = (2, _CODECS[settings.compression], 0, -1, -1, 0)
        self._tasks: dict[int, _Node] = {}
        self._identity: Identity | None = None
        self._identifying = asyncio.Lock()
        self._busy: dict[Lane, None] = {}  # those that are held
        self._idle: asyncio.Future[None] | None = None

    # -- in

    def add(self, route: Route, entry: Entry, key: bytes | None, body: bytes | None, headers: Pairs) -> None:
        """Append a record to its partition: that of its key as the Java client has it, or the next without one.

        Records without a key stay with one partition until its batch is full or sent (KIP-480): what is published at
        the same time shares a batch, and over time every partition has its share.
        """
        if key is None:
            lane = route.lanes[route.sticky]
        else:
            lane = route.lanes[(murmur2(key) & 0x7FFFFFFF) % len(route.leaders)]
        now = self._loop.time()
        if lane.batches:
            batch = lane.batches[-1]
            if batch.data is None and now < batch.until:
                if self._append(batch, entry, key, body, headers):
                    return
                batch.until = now  # full
                if key is None:
                    route.turn()
                    lane = route.lanes[route.sticky]
        batch = self._batch(route, now, now + self._settings.publish_timeout)
        if not self._append(batch, entry, key, body, headers):
            batch = self._plain(batch, [entry])
        lane.batches.append(batch)
        if not lane.held:
            lane.held = True
            self._busy[lane] = None
            self._queue(lane)

    @staticmethod
    def _append(batch: Batch, entry: Entry, key: bytes | None, body: bytes | None, headers: Pairs) -> bool:
        """Whether the batch takes it."""
        entries = batch.entries
        try:
            if batch.builder.append(len(entries), None, key, body, headers) is None:
                return False
        except TypeError:  # an `EscapedName`
            return False
        entries.append(entry)
        return True

    def _batch(self, route: Route, now: float, deadline: float) -> Batch:
        return Batch(DefaultRecordBatchBuilder(*self._form, route.limit), now, deadline)

    def _queue(self, lane: Lane) -> None:
        """Its first batch waits for its turn at the node that leads it."""
        number = lane.route.leader(lane.partition)
        if number < 0:
            self._rest(lane, BrokerUnavailable(f"Kafka: {lane.route.name}-{lane.partition} has no leader"))
            return
        node = self._tasks.get(number)
        if node is None:
            node = self._tasks[number] = _Node(number)
            node.task = asyncio.create_task(self._serve(node), name=f"streamfw kafka publishing to node {number}")
        node.ready.append(lane)
        if node.waiter is not None and not node.waiter.done():
            node.waiter.set_result(None)

    # -- the task of a node

    async def _serve(self, node: _Node) -> None:
        while True:
            if not node.ready:
                node.waiter = self._loop.create_future()
                await node.waiter
                node.waiter = None
            if self._settings.linger and not any(len(lane.batches) > 1 for lane in node.ready):
                await asyncio.sleep(self._settings.linger)
            taken: list[tuple[Lane, Batch]] = []
            try:
                identity = self._identity or await self._identified(node)
                self._take(node, identity, taken)
                if taken:
                    await self._send(node, taken)
            except BrokerError as error:
                lanes = [lane for lane, _ in taken] or [*node.ready]
                if not taken:
                    node.ready.clear()
                for lane in lanes:
                    self._failed(lane, error)
            except Exception as error:  # of ours: nobody may be left waiting, and the others go on
                log.exception("Kafka: publishing to node %d", node.number)
                for lane, batch in taken:
                    batch.doubtful |= batch.data is not None
                    self._failed(lane, BrokerUnavailable(f"Kafka: publishing: {error!r}"))

    async def _identified(self, node: _Node) -> Identity:
        """Our producer id, asked for when there is none."""
        async with self._identifying:
            if self._identity is None:
                what = "asking for a producer id"
                response = await self._nodes.ask(
                    InitProducerIdRequest(None, _FOR_EVER), what, node=node.number, use=_USE
                )
                if response.error_code:
                    error = response_error(response.error_code)
                    raise translated(error, what) from error
                self._identity = Identity(response.producer_id, response.producer_epoch)
            return self._identity

    def _take(self, node: _Node, identity: Identity, taken: list[tuple[Lane, Batch]]) -> None:
        """The first batch of each lane that waits here, as many as fit into a request."""
        size = 0
        while node.ready and size < _REQUEST_BYTES:
            lane = node.ready.popleft()
            batch = self._first(lane)
            if batch is None:
                continue
            if lane.partition == lane.route.sticky:
                lane.route.turn()
            taken.append((lane, batch))
            size += len(batch.data or self._numbered(lane, batch, identity))

    def _numbered(self, lane: Lane, batch: Batch, identity: Identity) -> bytearray:
        if lane.identity is not identity:
            lane.identity, lane.sequence = identity, 0
        batch.identity, batch.sequence = identity, lane.sequence
        batch.builder.set_producer_state(identity.number, identity.epoch, lane.sequence)
        data: bytearray = batch.builder.build()
        batch.data = data
        lane.sequence = (lane.sequence + len(batch.entries)) & 0x7FFFFFFF
        return data

    async def _send(self, node: _Node, taken: list[tuple[Lane, Batch]]) -> None:
        """One request, and its answer. Raises `BrokerError` when there is none; the batches are doubtful if it may have
        arrived."""
        connection = None
        try:
            async with asyncio.timeout_at(min(batch.deadline for _, batch in taken)):
                connection = await self._nodes.connection(node.number, _USE)
                response = await self._nodes.sent(connection, self._request(taken))
        except DRIVER_ERRORS as error:
            if connection is not None:
                connection.close()
                for _, batch in taken:
                    batch.doubtful = True
            raise translated(error, f"publishing to node {node.number}") from error
        answers = {(topic, answer[0]): answer for topic, answers in response.topics for answer in answers}
        for lane, batch in taken:
            _, code, *rest = answers.get((lane.route.name, lane.partition), (lane.partition, -1))
            self._answered(lane, batch, code, rest[4] if len(rest) > 4 else None)

    def _request(self, taken: Iterable[tuple[Lane, Batch]]) -> ProduceRequest:
        topics: dict[str, list[tuple[int, Any]]] = {}
        for lane, batch in taken:
            topics.setdefault(lane.route.name, []).append((lane.partition, batch.data))
        # The server gives up on its replicas before we give up on it: its answer says why.
        return ProduceRequest(None, -1, round(self._settings.request_timeout * 900), list(topics.items()))

    # -- answers

    def _answered(self, lane: Lane, batch: Batch, code: int, said: str | None) -> None:
        if code in _STORED:
            lane.batches.popleft()
            lane.pause = 0.0
            for call, _, _ in batch.entries:
                call.left -= 1
                if not call.left and not call.done.done():
                    call.done.set_result(None)
            self._next(lane)
            return
        what = f"publishing to {lane.route.name}-{lane.partition}"
        cause = response_error(code, said)
        error = translated(cause, what)
        error.__cause__ = cause
        if code in _DOUBTFUL or code in _NOT_YET:
            batch.doubtful |= code in _DOUBTFUL
            self._failed(lane, error)
        elif code in _IDENTITY:
            lane.batches.popleft()
            self._forget(batch.identity)
            if batch.doubtful:
                self._give_up(batch, OutcomeUnknown, error)
                self._next(lane)
            else:
                self._again(lane, batch, batch.entries)
                self._rest(lane, error)
        else:
            self._refused(lane, batch, error, alone=code not in _RIGHTS, too_large=code in _TOO_LARGE)

    def _refused(self, lane: Lane, batch: Batch, error: BrokerError, *, alone: bool, too_large: bool) -> None:
        """Not stored, for what is in it (`alone`: perhaps for one record of it)."""
        lane.batches.popleft()
        lane.pause = 0.0
        if batch.doubtful and not alone:
            self._give_up(batch, OutcomeUnknown, error)
            self._forget(batch.identity)
        elif alone and len(batch.entries) > 1:
            self._give_back(lane, batch)
            middle = len(batch.entries) // 2
            for half in (batch.entries[middle:], batch.entries[:middle]):
                self._again(lane, batch, half)
        else:
            self._give_back(lane, batch)
            if too_large:
                self._too_large(lane.route, batch.entries[0], error)
            else:
                self._give_up(batch, Rejected, error)
        self._next(lane)

    def _again(self, lane: Lane, batch: Batch, entries: list[Entry]) -> None:
        """Put entries of a batch that was not stored at the front of their lane."""
        lane.batches.appendleft(self._plain(batch, entries))

    def _plain(self, batch: Batch, entries: list[Entry]) -> Batch:
        """A closed batch of entries, in place of `batch`. The builder in Python takes names that are no text."""
        again = Batch(_DefaultRecordBatchBuilderPy(*self._form, _NO_LIMIT), 0.0, batch.deadline)
        again.until = 0.0
        again.entries = entries
        for place, (_, _, message) in enumerate(entries):
            key, headers = encoded(message)
            again.builder.append(place, None, key, value_of(message.body), headers)
        return again

    def _next(self, lane: Lane) -> None:
        if lane.batches:
            self._queue(lane)
        else:
            self._let_go(lane)

    def _let_go(self, lane: Lane) -> None:
        lane.held = False
        del self._busy[lane]
        if self._idle is not None and not self._busy and not self._idle.done():
            self._idle.set_result(None)

    # -- failures

    def _failed(self, lane: Lane, error: BrokerError) -> None:
        """The first batch of a lane could not be sent, or has no definite answer."""
        self._stale(lane.route)
        if error.transient or (isinstance(error, BrokerError) and type(error) is BrokerError):
            self._rest(lane, error)
            return
        batch = lane.batches.popleft()
        self._drop(lane, batch, Rejected if concerns_message(error) else Unavailable, error)
        self._next(lane)

    def _rest(self, lane: Lane, error: BrokerError) -> None:
        """Try again after a while, longer each time."""
        lane.trouble = error
        lane.pause = min(lane.pause * 2 or 0.05, 1.0)
        if lane.partition == lane.route.sticky:
            lane.route.turn()
        self._stale(lane.route)
        end = self._loop.time() + lane.pause * random.uniform(0.5, 1.0)
        self._loop.call_at(min(end, lane.batches[0].deadline), self._rested, lane)

    def _rested(self, lane: Lane) -> None:
        if lane.held and self._first(lane) is not None:
            self._queue(lane)

    def _first(self, lane: Lane) -> Batch | None:
        """Its first batch whose time is not over; None, and the lane is let go, if there is none."""
        now = self._loop.time()
        while lane.batches:
            batch = lane.batches[0]
            if batch.deadline > now and not lane.route.gone:
                return batch
            lane.batches.popleft()
            if lane.route.gone:
                gone = BrokerRefused(f"Kafka: topic {lane.route.name!r} does not exist any more")
                self._drop(lane, batch, Unroutable, gone)
            else:
                late = BrokerUnavailable(f"Kafka: publishing to {lane.route.name}-{lane.partition}: no answer in time")
                self._drop(lane, batch, Unavailable, lane.trouble or late)
        self._let_go(lane)
        return None

    def _drop(self, lane: Lane, batch: Batch, kind: type[PublishError], error: BrokerError) -> None:
        """Answer for a batch that was not stored, or for which that is not known. It is out of its lane."""
        self._give_back(lane, batch)
        self._give_up(batch, OutcomeUnknown if batch.doubtful else kind, error)

    def _give_back(self, lane: Lane, batch: Batch) -> None:
        """Its number, so that there is no gap; what may have been stored leaves none that is known to be free."""
        if batch.doubtful:
            self._forget(batch.identity)
        elif batch.data is not None and batch.identity is lane.identity:
            lane.sequence = batch.sequence

    def _forget(self, identity: Identity | None) -> None:
        if identity is self._identity:
            self._identity = None

    @staticmethod
    def _give_up(batch: Batch, kind: type[PublishError], error: BrokerError) -> None:
        for call, place, message in batch.entries:
            failure = kind(str(error), name=message.name, message_id=message.message_id)
            failure.__cause__ = error
            call.answer(place, failure)

    # -- the end

    async def close(self, deadline: float) -> None:
        """Let go out what is there, until `deadline` (of the loop's clock); what is left then gets its answer."""
        if self._busy:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=max(0.0, deadline - self._loop.time()))
        await ended(node.task for node in self._tasks.values())
        closed = BrokerUnavailable("Kafka: publishing was closed before the server had answered")
        for lane in self._busy:
            while lane.batches:
                batch = lane.batches.popleft()
                # What is being sent at this moment may have arrived.
                batch.doubtful |= batch.data is not None
                self._give_up(batch, OutcomeUnknown if batch.doubtful else Unavailable, closed)
            lane.held = False
        self._busy.clear()
