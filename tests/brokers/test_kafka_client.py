"""What streamfw_kafka uses of aiokafka that is not public, and the facts about its source that its reasons rest on.

Another version of aiokafka fails here, and not in production.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.consumer import fetcher, group_coordinator, subscription_state
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, UnknownMemberIdError
from aiokafka.producer.sender import Sender
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy, _DefaultRecordBatchPy

import streamfw_kafka
from streamfw_kafka.client import NO_GENERATION, NOTHING, GroupConsumer, fresh_assignor
from tests.brokers.kafka_apps import fill, filled, topic
from tests.brokers.kafka_kit import new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka

Coordinator = group_coordinator.GroupCoordinator


def text_of(*things: Any) -> str:
    return "\n".join(inspect.getsource(thing) for thing in things)


def one_behind_another(text: str, *parts: str) -> bool:
    at = -1
    for part in parts:
        at = text.find(part, at + 1)
        if at < 0:
            return False
    return True


# ------------------------------------------------------------------ names

# Each private name of aiokafka that streamfw_kafka uses: what of aiokafka has it, and how it is written there.
NAMES: dict[str, tuple[Any, str]] = {
    "_DefaultRecordBatchBuilderPy": (_DefaultRecordBatchBuilderPy, "class _DefaultRecordBatchBuilderPy"),
    "_DefaultRecordBatchPy": (_DefaultRecordBatchPy, "class _DefaultRecordBatchPy"),
    "_buffer": (_DefaultRecordBatchPy.__init__, "self._buffer = "),
    "_client": (AIOKafkaConsumer.__init__, "self._client = "),
    "_commit_refresh_task": (Coordinator.__init__, "self._commit_refresh_task = "),
    "_coordination_task": (Coordinator.__init__, "self._coordination_task = "),
    "_coordinator": (AIOKafkaConsumer.__init__, "self._coordinator = "),
    "_do_commit_offsets": (Coordinator, "async def _do_commit_offsets(self, assignment, offsets):"),
    "_fetch_task": (fetcher.Fetcher.__init__, "self._fetch_task = "),
    "_fetcher": (AIOKafkaConsumer.__init__, "self._fetcher = "),
    "_heartbeat_task": (Coordinator.__init__, "self._heartbeat_task = "),
    "_maybe_uncompress": (_DefaultRecordBatchPy, "def _maybe_uncompress(self)"),
    "_notify": (fetcher.Fetcher, "def _notify(self, future)"),
    "_num_records": (_DefaultRecordBatchPy.__init__, "self._num_records = "),
    "_partition_records": (fetcher.FetchResult.__init__, "self._partition_records = "),
    "_pending_tasks": (fetcher.Fetcher.__init__, "self._pending_tasks = "),
    "_pos": (_DefaultRecordBatchPy.__init__, "self._pos = "),
    "_records_iterator": (fetcher.PartitionRecords.__init__, "self._records_iterator = "),
    "_send_req": (Coordinator, "async def _send_req(self, request)"),
    "_sender": (AIOKafkaProducer.__init__, "self._sender = "),
    "_transaction_waiter": (TransactionManager.__init__, "self._transaction_waiter = "),
    "_txn_manager": (AIOKafkaProducer.__init__, "self._txn_manager = "),
    "_update_position": (fetcher.FetchResult, "def _update_position(self)"),
    "_wait_consume_future": (fetcher.Fetcher.__init__, "self._wait_consume_future = "),
    # These are names of ours as well, so no search finds them.
    "_closed": (AIOKafkaConsumer.__init__, "self._closed = "),
    "_consumer_record": (fetcher.PartitionRecords, "def _consumer_record(self, tp, record):"),
    "_do_heartbeat": (Coordinator, "async def _do_heartbeat(self)"),
    "_last_fetch_ended": (subscription_state.SubscriptionState, "self._last_fetch_ended = "),
    "_records": (fetcher.Fetcher.__init__, "self._records = "),
    "_subscription": (AIOKafkaConsumer.__init__, "self._subscription = "),
}

# And what is not private by its name, but not documented either.
UNDOCUMENTED: dict[str, tuple[Any, str]] = {
    "assignment.state_value": (subscription_state.Assignment, "def state_value(self, tp"),
    "assignment.tps": (subscription_state.Assignment, "def tps(self)"),
    "fetched.check_assignment": (fetcher.FetchResult, "def check_assignment(self, tp)"),
    "fetched.getall": (fetcher.FetchResult, "def getall(self, max_records=None)"),
    "fetched.has_more": (fetcher.FetchResult, "def has_more(self)"),
    "connection.connected": (AIOKafkaConnection, "def connected(self)"),
    "client.send": (AIOKafkaClient, "async def send(self, node_id, request, *, group=ConnectionGroup.DEFAULT)"),
    "coordinator.check_errors": (Coordinator, "def check_errors(self)"),
    "coordinator.coordinator_dead": (Coordinator, "def coordinator_dead(self)"),
    "coordinator.coordinator_id": (Coordinator.__init__, "self.coordinator_id = "),
    "coordinator.ensure_coordinator_known": (Coordinator, "async def ensure_coordinator_known(self)"),
    "coordinator.fetch_committed_offsets": (Coordinator, "async def fetch_committed_offsets(self, partitions)"),
    "coordinator.generation": (Coordinator.__init__, "self.generation = "),
    "coordinator.group_id": (Coordinator.__init__, "self.group_id = "),
    "coordinator.member_id": (Coordinator.__init__, "self.member_id = "),
    "fetcher.MemoryRecords": (fetcher.Fetcher._proc_fetch_request, "records = MemoryRecords(part_data[-1])"),
    "producer.client": (AIOKafkaProducer.__init__, "self.client = "),
    "sender.sender_task": (Sender, "def sender_task(self)"),
    "state.highwater": (fetcher.Fetcher._proc_fetch_request, "tp_state.highwater = "),
    "state.lso": (fetcher.Fetcher._proc_fetch_request, "tp_state.lso = "),
    "state.timestamp": (fetcher.Fetcher._proc_fetch_request, "tp_state.timestamp = "),
    "state.has_valid_position": (subscription_state.TopicPartitionState, "def has_valid_position(self)"),
    "state.position": (subscription_state.TopicPartitionState, "def position(self)"),
    "sticky.generation": (StickyPartitionAssignor, "generation: int = "),
    "sticky.member_assignment": (StickyPartitionAssignor, "member_assignment: list[TopicPartition] | None = None"),
    "sticky.on_generation_assignment": (StickyPartitionAssignor, "def on_generation_assignment(cls, generation"),
    "subscription.assignment": (subscription_state.Subscription, "def assignment(self)"),
    "subscription_state.abort_waiters": (subscription_state.SubscriptionState, "def abort_waiters(self, exc)"),
    "subscription_state.subscription": (subscription_state.SubscriptionState, "def subscription(self)"),
}


@pytest.mark.parametrize("name", [*NAMES, *UNDOCUMENTED])
def test_the_name_is_there(name: str) -> None:
    where, written = (NAMES | UNDOCUMENTED)[name]
    assert written in text_of(where)


def test_each_private_name_that_is_used_is_in_the_table() -> None:
    ours: set[str] = set()
    used: dict[str, set[str]] = {}
    for path in sorted(Path(streamfw_kafka.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    ours.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Attribute(attr=name) | ast.alias(name=name):
                    used.setdefault(name, set()).add(path.name)
                case _:
                    pass
    private = {name: files for name, files in used.items() if name.startswith("_") and not name.startswith("__")}
    assert {name: files for name, files in private.items() if name not in ours and name not in NAMES} == {}
    assert set(NAMES) - set(private) == {
        "_commit_refresh_task",
        "_consumer_record",
        "_do_heartbeat",
        "_last_fetch_ended",
        "_pending_tasks",
    }  # not read


# ------------------------------------------------------------------ facts about its source


def test_a_commit_is_one_attempt_and_takes_the_generation_before_it_suspends() -> None:
    """`GroupConsumer.commit_once`."""
    text = text_of(Coordinator._do_commit_offsets)
    request, sent = text.index("OffsetCommitRequest("), text.index("await self._send_req(request)")
    assert "self.generation," in text[request:sent] and "self.member_id," in text[request:sent]
    assert "await" not in text[:sent]
    assert "while" not in text
    assert text.count("assignment") == 1  # the parameter, which we give None
    send = text_of(Coordinator._send_req)
    assert "while" not in send and "generation" not in send
    assert one_behind_another(text_of(Coordinator.commit_offsets), "while True", "_do_commit_offsets", "sleep")


def test_records_may_come_before_the_listener_has_been_told() -> None:
    """`Membership.gate`: the assignment is there first, and what the listener raises is swallowed."""
    text = text_of(Coordinator._on_join_complete)
    assert one_behind_another(
        text, "assign_from_subscribed(", "await self._stop_commit_offsets", "on_partitions_assigned"
    )
    assert "except Exception:" in text and "raise" not in text
    assert "except Exception:" in text_of(Coordinator._on_join_prepare)
    assert "on_partitions_lost" not in text_of(group_coordinator)


def test_what_is_drained_is_returned_without_a_suspension() -> None:
    """`KafkaSource._read` relies on it: between the client's position and our hold nothing happens."""
    text = text_of(fetcher.Fetcher.fetched_records)
    drained = text[text.index("drained = {}") : text.index("waiter = self._create_fetch_waiter()")]
    assert one_behind_another(drained, "getall(max_records)", "drained[tp] = records", "return drained")
    assert "await" not in drained
    assert "if partitions and tp not in partitions:" in drained  # and a partition left out keeps its buffer
    get = text_of(AIOKafkaConsumer.getmany).rpartition('"""')[2]
    assert get.count("await ") == 1
    assert one_behind_another(get, "check_errors()", "await self._fetcher.fetched_records(")


def test_what_is_fetched_is_asked_for_its_records_as_we_answer() -> None:
    """`_Buffers`: what `FetchResult.getall` does besides, it does as well; and nobody else reads a record."""
    assert "self._records[tp] = FetchResult(" in text_of(fetcher.Fetcher._proc_fetch_request)
    assert one_behind_another(
        text_of(fetcher.FetchResult.getall),
        "if not self.check_assignment(tp) or not self.has_more():", "return []",
        "for msg in self._partition_records:", "self._update_position()", "break",
        "else:", "self._update_position()", "self._partition_records = None", "return ret_list",
    )  # fmt: skip
    assert "next(self._records_iterator)" in text_of(fetcher.PartitionRecords.__next__)
    assert one_behind_another(
        text_of(fetcher.PartitionRecords._unpack_records),
        "consumer_record = self._consumer_record(tp, record)", "self.next_fetch_offset = record.offset + 1",
        "yield consumer_record", "self.next_fetch_offset = next_batch.next_offset",
    )  # fmt: skip


def test_a_seek_throws_away_what_is_buffered() -> None:
    text = text_of(fetcher.Fetcher.seek_to)
    assert one_behind_another(text, "self._subscriptions.seek(tp, offset)", "del self._records[tp]")
    assert "await" not in text


def test_a_cancelled_fetch_leaks_a_counter() -> None:
    """Why nobody cancels a `fetch`: poll detection would be off for good."""
    text = text_of(subscription_state.SubscriptionState.fetch_context)
    assert one_behind_another(text, "_fetch_count += 1", "yield", "_fetch_count -= 1")
    assert "try" not in text


def test_errors_of_the_group_wait_for_somebody_who_asks() -> None:
    """`GroupConsumer.raise_errors`: with the gate shut nobody calls ``getmany``, which would."""
    text = text_of(Coordinator._push_error_to_user)
    assert one_behind_another(text, "self._pending_exception = exc", "return asyncio.wait(", "_error_consumed_fut")
    assert one_behind_another(text_of(Coordinator.check_errors), "_coordination_task.result()", "raise exc")


def test_a_static_member_sends_its_name_with_a_join_only() -> None:
    """Why two with one name find out by being thrown out, and why a stop does not leave."""
    for part in (Coordinator._do_heartbeat, Coordinator._do_commit_offsets):
        assert "group_instance_id" not in text_of(part)
    assert "self._group_instance_id is None" in text_of(Coordinator._maybe_leave_group)


def test_a_heartbeat_is_asked_of_the_object_and_says_whether_it_was_accepted() -> None:
    """`GroupConsumer.heartbeats` counts in its place."""
    assert "success = await self._do_heartbeat()" in text_of(Coordinator._heartbeat_routine)
    accepted = text_of(Coordinator._do_heartbeat)
    assert accepted.count("return True") == 2 and "return False" in accepted


def test_who_does_not_poll_leaves_the_group_by_a_clock_that_we_set() -> None:
    """`GroupConsumer.stay_polled`."""
    text = inspect.getsource(subscription_state.SubscriptionState)
    idle = text[text.index("def fetcher_idle_time") :]
    assert "time.monotonic() - self._last_fetch_ended" in idle
    assert "fetcher_idle_time" in text_of(Coordinator._heartbeat_routine, Coordinator.ensure_active_group)


def test_aborting_waiters_ends_a_getmany() -> None:
    """`GroupConsumer.interrupt`: also one that waits for an assignment."""
    text = text_of(subscription_state.SubscriptionState.abort_waiters)
    assert one_behind_another(text, "_assignment_waiters", "set_exception", "_fetch_waiters", "set_exception")
    waits = text_of(fetcher.Fetcher.fetched_records)
    assert "await self._subscriptions.wait_for_assignment()" in waits and "waiter.result()" in waits


def test_nobody_else_tells_the_assignor_its_generation() -> None:
    assert "on_generation_assignment" not in text_of(group_coordinator)


def test_stopping_waits_for_a_join_and_does_not_leave_before() -> None:
    """Why `GroupConsumer.end` leaves by another connection when a join takes long."""
    text = text_of(Coordinator.close)
    assert one_behind_another(text, "await self._coordination_task", "await self._maybe_leave_group()")
    assert "connected(" in text_of(AIOKafkaClient._get_conn) and "group" in text_of(AIOKafkaClient._get_conn)


# ------------------------------------------------------------------ and about what it does


@asynccontextmanager
async def joined(kafka: Kafka, name: str, group: str, assignor: type[StickyPartitionAssignor]) -> AsyncIterator[Any]:
    consumer = GroupConsumer(
        assignor, bootstrap_servers=kafka.bootstrap, group_id=group, session_timeout_ms=6000, heartbeat_interval_ms=100
    )
    consumer.subscribe([name])
    await consumer.start()
    try:
        await eventually(consumer.assignment)
        yield consumer
    finally:
        await consumer.stop()


async def test_assignors_of_one_class_overwrite_each_other_and_fresh_ones_do_not(kafka: Kafka) -> None:
    one, two, group = await topic(kafka, 3), await topic(kafka, 2), new_name("group")
    shared = fresh_assignor()
    async with joined(kafka, one, group + "-1", shared), joined(kafka, two, group + "-2", shared):
        assert {tp.topic for tp in shared.member_assignment or ()} == {two}
    first, second = fresh_assignor(), fresh_assignor()
    async with joined(kafka, one, group + "-3", first) as consumer, joined(kafka, two, group + "-4", second):
        assert {tp.topic for tp in first.member_assignment or ()} == {one}
        assert {tp.topic for tp in second.member_assignment or ()} == {two}
        assert first.generation == NO_GENERATION and consumer.generation == 1  # until we tell it
        consumer.tell_assignor(1)
        assert (first.generation, second.generation) == (1, NO_GENERATION)
        assert StickyPartitionAssignor.member_assignment is None


async def test_a_commit_of_no_generation_is_accepted_by_an_empty_group(kafka: Kafka) -> None:
    """Why nothing is committed without one."""
    name, group = await filled(kafka, 10), new_name("group")
    stranger = GroupConsumer(fresh_assignor(), bootstrap_servers=kafka.bootstrap, group_id=group)
    await stranger.start()
    try:
        stranger.assign([TopicPartition(name, 0)])
        await stranger._coordinator.ensure_coordinator_known()
        async with joined(kafka, name, group, fresh_assignor()):
            with pytest.raises(UnknownMemberIdError):
                await stranger.commit_once({TopicPartition(name, 0): 3}, 5.0)
        await stranger.commit_once({TopicPartition(name, 0): 4}, 5.0)
        found = await stranger.committed_offsets([TopicPartition(name, 0), TopicPartition(name, 1)])
        assert found == {TopicPartition(name, 0): 4}  # and what was never committed is left out
    finally:
        await stranger.stop()


async def test_a_partition_left_out_keeps_its_buffer(kafka: Kafka) -> None:
    name, group = await filled(kafka, 20), new_name("group")
    left, other = TopicPartition(name, 0), TopicPartition(name, 1)
    async with joined(kafka, name, group, fresh_assignor()) as consumer:
        for tp in (left, other):
            consumer.seek(tp, 0)
        await eventually(lambda: consumer.buffered(left) and consumer.buffered(other))
        assert await consumer.getmany(NOTHING, timeout_ms=0) == {}
        assert consumer.buffered(left) and consumer.read_to(left) == 0
        assert [*await consumer.getmany(other, timeout_ms=1000)] == [other]
        assert consumer.buffered(left) and consumer.read_to(left) == 0 and consumer.read_to(other) == 10
        assert consumer.read_to(TopicPartition(name, 7)) is None


async def test_records_are_what_aiokafka_makes_of_them(kafka: Kafka) -> None:
    """In pieces that do not end where a batch of the log does, over two partitions."""
    name = await topic(kafka, 2)
    for partition in range(2):
        await fill(
            kafka, name, [b"a", None, b"", b"b"], partition=partition, key=b"k", headers=[("h", b"1"), ("h", None)]
        )
        await fill(kafka, name, [b"%d" % n for n in range(50)], partition=partition, linger_ms=20, timestamp_ms=1234)
    both = {TopicPartition(name, partition) for partition in range(2)}

    async def told(consumer: AIOKafkaConsumer) -> list[Any]:
        found: list[Any] = []
        consumer.assign(both)
        for tp in both:
            consumer.seek(tp, 1)
        while len(found) < 106:
            for tp, records in (await consumer.getmany(timeout_ms=5000, max_records=7)).items():
                assert len(records) <= 7
                assert await consumer.position(tp) == records[-1].offset + 1
                found += [
                    (tp, r.offset, r.key, r.value, r.timestamp, r.timestamp_type, tuple(r.headers)) for r in records
                ]
        return sorted(found)

    stock = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap)
    ours = GroupConsumer(fresh_assignor(), bootstrap_servers=kafka.bootstrap)
    async with stock, ours:
        assert await told(ours) == await told(stock)


async def test_a_consumer_tells_whether_it_is_kept_in_the_group(kafka: Kafka) -> None:
    name, group = await topic(kafka), new_name("group")
    async with joined(kafka, name, group, fresh_assignor()) as consumer:
        await eventually(lambda: consumer.beating and consumer.coordinated)
        consumer._coordinator._coordination_task.cancel()
        await eventually(lambda: not consumer.coordinated)
        with pytest.raises((KafkaError, asyncio.CancelledError)):
            consumer._coordinator.check_errors()
        consumer._coordinator._coordination_task = asyncio.create_task(asyncio.sleep(0))
