"""What we use of aiokafka that is not public, in one place.

Each name stands here with the reason why the public one will not do; `tests/brokers/test_kafka_client.py` holds the
facts about aiokafka's source that the reasons rest on, so that another version of it fails there and not in production.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import aiokafka
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, NotCoordinatorForGroupError
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.structs import OffsetAndMetadata

from .stable import AGAIN, StableOffsetFetchRequest, stable_offsets_in

__all__ = ["NOTHING", "NO_GENERATION", "GroupConsumer", "fresh_assignor"]

# Where nobody has set up logging, Python prints errors; what aiokafka calls one, it mostly tries again, and what it
# does not is raised here.
logging.getLogger("aiokafka").addHandler(logging.NullHandler())
if logging.getLogger("aiokafka").level == logging.NOTSET:
    logging.getLogger("aiokafka").setLevel(logging.WARNING)  # who wants to know more sets it


class _Calm(logging.Filter):
    """Leaves out what aiokafka warns of though it is part of any group's life; what we make of it is logged here."""

    ORDINARY = ("Heartbeat failed for group %s because it is rebalancing", "Group Coordinator Request failed: %s")

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg not in self.ORDINARY


logging.getLogger("aiokafka.consumer.group_coordinator").addFilter(_Calm())
log = logging.getLogger("streamfw.kafka")

NOTHING = TopicPartition("\0nothing", 0)
"""A partition that nobody has: ``getmany(NOTHING)`` waits, touches no buffer, and tells poll detection that we live.
(``getmany()`` without partitions means all of them, and ``pause`` would throw away what is buffered.)"""

NO_GENERATION = -1
"""The generation of who is no member. A commit under it is accepted by a group without members, so none is sent."""


def fresh_assignor() -> type[StickyPartitionAssignor]:
    """A sticky assignor of one consumer's own: aiokafka keeps its state on the class, where two consumers of a process
    would overwrite each other."""
    return type("Sticky", (StickyPartitionAssignor,), {"member_assignment": None, "generation": NO_GENERATION})


Make: TypeAlias = Callable[[TopicPartition, Iterable[Any]], "list[Any]"]


class _Buffers(dict[TopicPartition, Any]):
    """What a consumer has fetched, by partition, handed out by its `GroupConsumer.make`.

    aiokafka makes a `ConsumerRecord` of each, one by one, in Python: 0.55 us, as much as all that its parser does. The
    parser's have the same attributes but for ``topic`` and ``partition``, and a list of headers.
    """

    def __init__(self, consumer: GroupConsumer) -> None:
        self._consumer = consumer

    def __setitem__(self, tp: TopicPartition, fetched: Any) -> None:
        if type(fetched) is FetchResult:  # or what went wrong
            fetched._partition_records._consumer_record = _as_it_is
            fetched.getall = partial(self._take, tp, fetched)
        super().__setitem__(tp, fetched)

    def _take(self, tp: TopicPartition, fetched: Any, most: int | None = None) -> list[Any]:
        """As `FetchResult.getall`, but at once."""
        if not fetched.check_assignment(tp) or not fetched.has_more():
            return []
        found = self._consumer.make(tp, islice(fetched._partition_records._records_iterator, most))
        fetched._update_position()
        if most is None or len(found) < most:
            fetched._partition_records = None
        return found


def _as_it_is(tp: TopicPartition, record: Any) -> Any:
    return record


class GroupConsumer(AIOKafkaConsumer):  # type: ignore[misc, unused-ignore]  # no types in every version of aiokafka
    """An aiokafka consumer, with what a source needs to know of it."""

    def __init__(self, assignor: type[StickyPartitionAssignor], **options: Any) -> None:
        self._sticky = assignor
        super().__init__(
            enable_auto_commit=False,
            auto_offset_reset="none",  # where to begin is ours to decide, count and log
            partition_assignment_strategy=(assignor,),
            **options,
        )
        self._committed_only = options.get("isolation_level") == "read_committed"
        self._static = options.get("group_instance_id") is not None
        self.heartbeats = 0  # that the group accepted
        self.make: Make = lambda tp, records: [*records]
        """What ``getmany`` returns in the place of a partition's records."""

    async def start(self) -> None:
        """See `AIOKafkaConsumer.start`."""
        await super().start()
        self._fetcher._records = _Buffers(self)  # nothing is subscribed to yet, so nothing is buffered
        self._count_heartbeats()

    # -- the group

    def _count_heartbeats(self) -> None:
        """When one was last accepted only a local variable of aiokafka's loop knows."""
        coordinator = self._coordinator
        beat = getattr(coordinator, "_do_heartbeat", None)
        if beat is None:  # without a group
            return

        async def counted() -> bool:
            accepted: bool = await beat()
            self.heartbeats += accepted
            return accepted

        coordinator._do_heartbeat = counted

    @property
    def generation(self) -> int:
        """The group's generation that we are a member of; `NO_GENERATION` for no member. There is no public one."""
        coordinator = self._coordinator
        generation: int = NO_GENERATION if coordinator is None else coordinator.generation
        return generation

    @property
    def coordinated(self) -> bool:
        """Whether what keeps us in the group still runs; it has ended in silence (aiokafka #983, #1037)."""
        coordinator = self._coordinator
        return coordinator is not None and not coordinator._coordination_task.done()

    @property
    def beating(self) -> bool:
        """Whether heartbeats are sent. Not while a rebalance goes on, nor until we have joined again."""
        beat = None if self._coordinator is None else self._coordinator._heartbeat_task
        return beat is not None and not beat.done()

    def raise_errors(self) -> None:
        """What aiokafka has against our group (another assignor there, no right, a session it does not allow). It keeps
        that for who calls ``getmany`` next, and stands still until then: nobody does before we have partitions. Raises
        a `KafkaError`."""
        coordinator = self._coordinator
        if coordinator is not None and not coordinator._coordination_task.cancelled():
            coordinator.check_errors()

    def stay_polled(self) -> None:
        """Be alive for the client, which leaves the group of who does not call ``getmany`` for ``max_poll_interval``,
        and then does not join again before he does (#1187). Ours does not while all is full, nor while he waits for the
        gate: in a rebalance that takes as long (the servers were away) that would be the end. ``getmany`` itself would
        wait for that rebalance."""
        self._subscription._last_fetch_ended = time.monotonic()

    def interrupt(self) -> None:
        """End a ``getmany`` that waits for the group or for records: it raises a `KafkaError`. One that was called in a
        rebalance waits for its end, and if that never comes, for ever."""
        if self._fetcher is not None:
            self._subscription.abort_waiters(KafkaError("interrupted"))

    def tell_assignor(self, generation: int) -> None:
        """aiokafka never calls this; without it every join claims to come from a group of no generation, and what was
        sticky loses against any other member's claim."""
        self._sticky.on_generation_assignment(generation)

    def forget_assignment(self) -> None:
        """Claim nothing in the next join: we were taken for dead, and what was ours is somebody else's."""
        self._sticky.member_assignment = None

    async def commit_once(
        self, offsets: Mapping[TopicPartition, int], seconds: float, facts: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """One attempt under the generation we are in now, which is put into the request before anything suspends.
        `facts` are kept beside the offsets, for whoever asks.

        The public ``commit`` tries again for ever, and takes the generation anew at each try: a commit that is retried
        over a rebalance would go out as if it were the new owner's. Raises a `KafkaError` or `TimeoutError`.
        """
        told = facts or {}
        request = {tp: OffsetAndMetadata(offset, told.get(tp, "")) for tp, offset in offsets.items()}
        # Not asyncio.wait_for: on 3.11 that makes a task, and a rebalance fits between the caller's look and its start.
        async with asyncio.timeout(seconds):
            await self._coordinator._do_commit_offsets(None, request)

    async def committed_offsets(
        self, partitions: Iterable[TopicPartition], *, stable: bool = False
    ) -> dict[TopicPartition, int]:
        """What the group has committed, in one request (the public ``committed`` makes one a partition). `stable`: by
        transactions as well, also by one whose commit was only just accepted."""
        if stable:
            return await self._stable_offsets(partitions)
        found = await self._coordinator.fetch_committed_offsets(list(partitions))
        return {tp: meta.offset for tp, meta in found.items()}

    async def _stable_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """See `stable`. There is no public request of that version, and none that is sent to the group's coordinator.
        Waits for the ends of transactions, as long as those take; raises a `KafkaError`, or `NotImplementedError` on a
        server before 2.5."""
        coordinator = self._coordinator
        request = StableOffsetFetchRequest(coordinator.group_id, partitions)
        while True:
            await coordinator.ensure_coordinator_known()
            try:
                found = stable_offsets_in(await coordinator._send_req(request))
            except NotCoordinatorForGroupError:
                coordinator.coordinator_dead()
            except KafkaError as error:
                if not error.retriable:
                    raise
            else:
                if found is not None:
                    return found
            await asyncio.sleep(AGAIN)

    # -- the log

    def _state(self, tp: TopicPartition) -> Any:
        subscription = self._subscription.subscription
        assignment = subscription.assignment if subscription is not None else None
        return None if assignment is None or tp not in assignment.tps else assignment.state_value(tp)

    def read_to(self, tp: TopicPartition) -> int | None:
        """The offset that is read next: past what was delivered, and past the markers behind it. None when it is not
        known now. The public ``position`` may wait for long."""
        state = self._state(tp)
        position: int | None = state.position if state is not None and state.has_valid_position else None
        return position

    def heard(self, tp: TopicPartition) -> tuple[int | None, int | None]:
        """The time (in ms, of the wall clock) of the last good answer to a fetch of this partition, and where the
        partition ended then, as far as it is read (with ``read_committed``: before open transactions)."""
        state = self._state(tp)
        if state is None or state.timestamp is None:
            return None, None
        stable: int | None = state.lso if self._committed_only else None
        end: int | None = stable if stable is not None and stable >= 0 else state.highwater
        return state.timestamp, end

    @property
    def reading(self) -> bool:
        """Whether the task that fetches still runs. ``getmany`` does not ask: it would find nothing for ever."""
        return self._fetcher is not None and not self._fetcher._fetch_task.done()

    def buffered(self, tp: TopicPartition) -> bool:
        """Whether something of this partition was fetched that nobody has taken yet."""
        return self._fetcher is not None and tp in self._fetcher._records

    def take_raised(self) -> list[TopicPartition]:
        """The partitions whose records raised out of ``getmany``, which does not say whose: the generator that reads
        them has ended, and nobody has seen its end. They leave the buffer, and are fetched again."""
        fetcher = self._fetcher
        buffer = {} if fetcher is None else fetcher._records
        found = [tp for tp, result in buffer.items() if _has_raised(getattr(result, "_partition_records", None))]
        for tp in found:
            del buffer[tp]
            fetcher._notify(fetcher._wait_consume_future)
        return found

    async def end(self, seconds: float) -> None:
        """Leave the group and close, within so many seconds; what does not answer by then is cut."""
        stopping = asyncio.ensure_future(self.stop())
        try:
            await asyncio.wait([stopping], timeout=seconds / 4)
            if not stopping.done():
                await self._leave_at_once(seconds / 4)
                await asyncio.wait([stopping], timeout=seconds / 4)
        finally:
            if not stopping.done() or stopping.cancelled() or stopping.exception() is not None:
                await self._cut(stopping, seconds / 4)  # the server is away: it will miss us by itself

    async def _leave_at_once(self, seconds: float) -> None:
        """Leave by another connection. ``stop`` waits for a join that is on its way, and that waits for the slowest
        member; on its connection the server reads nothing before it has answered. Who does not leave is waited for by
        the whole group, for a session timeout."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.coordinator_id is None or not coordinator.member_id or self._static:
            return
        request = LeaveGroupRequest(coordinator.group_id, coordinator.member_id)
        try:
            async with asyncio.timeout(seconds):
                await self._client.send(coordinator.coordinator_id, request)
        except (KafkaError, OSError, TimeoutError) as error:
            log.info("leaving group %r: %r", coordinator.group_id, error)

    async def _cut(self, stopping: asyncio.Future[None], seconds: float) -> None:
        self._closed = True
        tasks = [stopping, *_tasks_of(self._coordinator), *_tasks_of(self._fetcher)]
        for task in tasks:
            task.cancel()
        tasks.append(asyncio.ensure_future(self._client.close()))
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # heard: nobody else will


def _tasks_of(part: Any) -> Sequence[asyncio.Task[Any]]:
    names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_fetch_task")
    found = [getattr(part, name, None) for name in names]
    # Of a fetcher: requests, and questions that nobody may answer any more.
    found += getattr(part, "_pending_tasks", ())
    return [task for task in found if isinstance(task, asyncio.Task) and not task.done()]


def _has_raised(records: Any) -> bool:
    iterator = None if records is None else records._records_iterator
    return iterator is not None and iterator.gi_frame is None


VERSION: str = aiokafka.__version__
