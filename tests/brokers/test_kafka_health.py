"""A Kafka source that notices what nobody tells it, and says so. The watch's times are shortened; faults are made in
the client, inside the process."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.consumer import fetcher, group_coordinator, subscription_state

from streamfw import App, subscriber
from streamfw.broker import Health
from streamfw.errors import BrokerUnavailable
from streamfw_kafka import Topic, watch
from streamfw_kafka.admin import Member, Topics
from streamfw_kafka.source import KafkaSource
from tests.brokers.kafka_apps import QUICK, all_committed, app_of, fill, filled, member, numbers, source_of, topic
from tests.brokers.kafka_kit import new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka, OwnKafka


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"EVERY": 0.02, "ASK": 0.1, "QUIET": 0.5, "STALL": 0.4}.items():
        monkeypatch.setattr(watch, name, seconds)


class Running:
    """An app with one subscriber that notes what it handled, and its source."""

    def __init__(self, app: App, done: list[int]) -> None:
        self.app, self.done = app, done
        self.source: KafkaSource = source_of(app)

    @property
    def health(self) -> Health:
        (health,) = self.app.health().subscribers.values()
        return health

    @property
    def reopened(self) -> int:
        return self.app.pumps[0].counters.reopened

    @property
    def coordinator(self) -> Any:
        return self.source.group.consumer._coordinator

    async def unhealthy(self, what: str, deadline: float = 15.0) -> None:
        await eventually(lambda: not self.health.ok and what in self.health.detail, deadline, f"not told: {what!r}")

    async def healthy(self, what: str = "", deadline: float = 15.0) -> None:
        await eventually(lambda: self.health.ok and what in self.health.detail, deadline, f"not healthy: {what!r}")

    async def handled(self, count: int) -> None:
        """So many are, and committed: a source that is opened again would repeat what is not."""
        parts = self.source.group.parts
        await eventually(lambda: len(self.done) == count and all(p.committed == p.mark.end for p in parts.values()))

    async def stays_healthy(self, seconds: float) -> set[str]:
        """Everything that is said while the watch's clock runs on for so long; all of it must be well."""
        end, said = self.source.watch.clock + seconds, set()
        while self.source.watch.clock < end:
            assert self.health.ok, self.health
            said.add(self.health.detail)
            await asyncio.sleep(0.005)
        return said


@asynccontextmanager
async def running(
    kafka: Kafka,
    source: str | Topic,
    *,
    handling: Callable[[int], Awaitable[object]] | None = None,
    group: str = "",
    broker: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """`handling` is awaited with each message; `broker` and the rest are options of the broker and the subscriber."""
    done: list[int] = []

    @subscriber(source, **options)
    async def handle(number: int) -> None:
        if handling is not None:
            await handling(number)
        done.append(number)

    app = app_of(kafka, handle, name=group or new_name("group"), drain_timeout=0.5, **(broker or {}))
    async with app.running():
        found = Running(app, done)
        await eventually(lambda: found.source.group.gate)
        yield found


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


# ------------------------------------------------------------------ no false alarms


async def test_an_idle_source_is_healthy_and_asks_nothing(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    latest = Topics.latest

    async def counted(topics: Topics, partitions: Any) -> Any:
        asked.append(partitions)
        return await latest(topics, partitions)

    monkeypatch.setattr(watch, "ASK", 1.0)  # the client's own fetches are answered far more often
    empty, read = await topic(kafka, 3), await filled(kafka, 20)
    async with running(kafka, empty) as one, running(kafka, read) as two:
        await eventually(lambda: len(two.done) == 20)
        await two.healthy("2 partitions, lag 0")
        monkeypatch.setattr(Topics, "latest", counted)
        said = await one.stays_healthy(2.0)
        assert said == {"3 partitions, lag 0"}
        await two.stays_healthy(0.1)
        assert asked == []


@pytest.mark.parametrize("ends", ["open", "aborted"])
async def test_a_transaction_at_the_end_is_no_lag(kafka: Kafka, ends: str) -> None:
    """Its records are not to be read (yet): the end is before them, or the position gets past them."""
    name = await filled(kafka, 4, 1)
    async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=new_name()) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(name, b"4", partition=0)
        if ends == "aborted":
            await producer.abort_transaction()
        async with running(kafka, name) as one:
            await eventually(lambda: one.done == [0, 1, 2, 3])
            await one.healthy("lag 0")
            await one.stays_healthy(1.5)
            assert (one.done, one.reopened) == ([0, 1, 2, 3], 0)
        if ends == "open":
            await producer.abort_transaction()


async def test_messages_after_a_long_silence_are_no_stall(kafka: Kafka) -> None:
    """Nothing was read for long because nothing was there."""
    name = await topic(kafka, 1)
    async with running(kafka, name) as one:
        await one.stays_healthy(1.0)
        for number in range(20):
            await fill(kafka, name, numbers([number]))
            await one.stays_healthy(0.04)
        await one.handled(20)
        assert one.reopened == 0


async def test_a_process_that_was_stopped_has_not_waited(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        await one.healthy()
        seen = one.source.watch
        before = seen.clock
        seen.look(asyncio.get_running_loop().time() + 3600)  # as after an hour of SIGSTOP
        assert seen.clock - before < 2.1 * watch.EVERY
        assert one.health.ok and one.source.group.failure is None
        seen._looked = asyncio.get_running_loop().time()
        await one.stays_healthy(0.2)


async def test_slow_handlers_are_no_stall(kafka: Kafka) -> None:
    """No fetch waits: the subscriber has enough, and reads on when it has room."""
    name, go_on = await filled(kafka, 40, 1), asyncio.Event()
    async with running(kafka, name, handling=lambda _: go_on.wait(), prefetch=5) as one:
        await eventually(lambda: one.app.pumps[0].in_flight == 5 and one.source.watch.lag() == 40)
        said = await one.stays_healthy(1.5)
        assert any(text.startswith("1 partition, lag 40; offset 0 of") and "is open for" in text for text in said)
        go_on.set()
        await eventually(lambda: len(one.done) == 40)
        assert one.reopened == 0


# ------------------------------------------------------------------ what stops in silence


async def never_fetch(one: Running) -> None:
    """From now on the client gets nothing, and does not notice."""
    begun = asyncio.Event()

    async def nothing(*_: object) -> bool:
        begun.set()
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:  # as the one that it replaces
            pass
        return False

    one.source.group.consumer._fetcher._proc_fetch_request = nothing
    await begun.wait()


async def test_a_consumer_that_stops_in_silence_is_told_and_opened_again(kafka: Kafka) -> None:
    name = await filled(kafka, 10)
    async with running(kafka, name) as one:
        await one.handled(10)
        await never_fetch(one)
        await fill(kafka, name, numbers([10]), partition=1)
        await one.unhealthy(f"nothing is read of {name}-1 for ")
        assert "from 5 on, though it ends at 6" in one.health.detail
        await eventually(lambda: one.reopened == 1)
        await eventually(lambda: one.done[10:] == [10])
        await one.healthy("2 partitions, lag 0")


async def test_one_that_stands_at_the_same_offset_again_is_waited_for_longer(kafka: Kafka) -> None:
    """Or a position that cannot get to its end would have the source opened again for ever."""
    name = await filled(kafka, 1, 1)
    async with running(kafka, name) as one:
        await eventually(lambda: one.done == [0])
        await never_fetch(one)
        await fill(kafka, name, numbers([1]))
        seen = one.source.watch
        seen._stood = dict.fromkeys(one.source.group.parts, (1, 4))  # as if it had been in vain twice
        await one.unhealthy("nothing is read of ")
        (since,) = [each.behind for each in seen._seen.values()]
        assert since is not None
        while seen.clock < since + 7 * watch.STALL:
            assert one.reopened == 0
            await asyncio.sleep(0.005)
        await eventually(lambda: one.reopened == 1)
        assert [*seen._stood.values()] == [(1, 8)]
        await eventually(lambda: one.done == [0, 1])


@pytest.mark.parametrize("task", ["_fetcher._fetch_task", "_coordinator._coordination_task"])
async def test_a_task_of_the_client_that_ended_is_noticed_at_once(kafka: Kafka, task: str) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        part, attribute = task.split(".")
        getattr(getattr(one.source.group.consumer, part), attribute).cancel()
        await eventually(lambda: one.reopened == 1)
        await fill(kafka, name, numbers([4]))
        await eventually(lambda: one.done[4:] == [4])
        await one.healthy("lag 0")


# ------------------------------------------------------------------ the group


def shorten(one: Running, **seconds: float) -> None:
    """Times that the server has a say in, for the watch alone."""
    settings = copy.copy(one.source.watch._settings)
    for name, value in seconds.items():
        msgspec.structs.force_setattr(settings, name, value)
    one.source.watch._settings = settings


def never_join(one: Running) -> None:
    async def in_vain(_: object) -> bool:
        await asyncio.sleep(0.02)
        return False

    one.coordinator._do_rejoin_group = in_vain
    one.coordinator.request_rejoin()


async def test_a_rebalance_is_no_trouble_until_it_takes_too_long(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        shorten(one, rebalance_timeout=1.0, session_timeout=0.5)
        never_join(one)
        await one.healthy("the group moves its partitions")
        await one.stays_healthy(0.4)
        await one.unhealthy("joining the consumer group for ")
        await eventually(lambda: one.reopened == 1)
        await one.healthy("2 partitions, lag 0")


async def test_a_rebalance_longer_than_the_poll_interval_ends_all_the_same(kafka: Kafka) -> None:
    """aiokafka does not join again before somebody calls getmany, and our fetch waits for the gate."""
    name = await filled(kafka, 4)
    async with running(kafka, name, broker={"max_poll_interval": 1.0}) as one:
        await one.handled(4)
        loop, joins = asyncio.get_running_loop(), one.coordinator._do_rejoin_group
        end = loop.time() + 2.0

        async def late(subscription: object) -> bool:
            if loop.time() > end:
                return bool(await joins(subscription))
            await asyncio.sleep(0.05)
            return False

        one.coordinator._do_rejoin_group = late
        one.coordinator.request_rejoin()
        await eventually(lambda: not one.source.group.gate)
        await eventually(lambda: one.source.group.gate)
        assert loop.time() > end and one.source.group.rebalances == 2
        await fill(kafka, name, numbers([4]))
        await eventually(lambda: one.done[4:] == [4])
        assert one.reopened == 0


async def test_who_is_no_member_any_more_and_does_not_join_is_opened_again(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        shorten(one, session_timeout=2.0)
        one.coordinator.request_rejoin = lambda: None
        one.coordinator._do_heartbeat = _well
        one.coordinator.generation = -1
        await one.unhealthy("no member of the group any more")
        await eventually(lambda: one.reopened == 1)
        await one.healthy("2 partitions, lag 0")


async def _well() -> bool:
    return True


async def test_heartbeats_without_an_answer(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        beat = one.coordinator._do_heartbeat

        async def unanswered() -> bool:
            return False

        one.coordinator._do_heartbeat = unanswered
        await one.unhealthy("no heartbeat was answered for ")
        one.coordinator._do_heartbeat = beat
        await one.healthy("2 partitions, lag 0")
        assert one.reopened == 0


async def test_heartbeats_that_nobody_sends(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        shorten(one, session_timeout=1.0)
        one.coordinator._heartbeat_task.cancel()
        await one.unhealthy("no heartbeat was sent for ")
        await eventually(lambda: one.reopened == 1)
        await one.healthy("2 partitions, lag 0")


async def test_one_without_partitions_knows_who_has_them(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    name, group = await filled(kafka, 4, 1), new_name("group")
    async with member(kafka, name, group), running(kafka, name, group=group) as one:
        await eventually(lambda: not one.source.group.parts)
        await one.healthy("no partitions: the group has 2 members, who have all 1 of them")
        await one.stays_healthy(1.2)
        # As if the group had more for us than it gave us.
        described = Topics.group

        async def without(topics: Topics, name: str) -> Any:
            found = await described(topics, name)
            idle = tuple(msgspec.structs.replace(each, partitions=()) for each in found.members)
            assert all(isinstance(each, Member) for each in idle)
            return msgspec.structs.replace(found, members=idle)

        monkeypatch.setattr(Topics, "group", without)
        await one.unhealthy("no partitions, and nobody has 1 of them")
        await eventually(lambda: one.reopened >= 1)
        monkeypatch.setattr(Topics, "group", described)
        await one.healthy()


def hang(source: KafkaSource) -> None:
    """As when records arrive in a rebalance: a `getmany` that is under way looks, and waits for its end."""
    waiters = source.group.consumer._fetcher._fetch_waiters
    assert source._fetching and waiters
    for waiter in list(waiters):
        waiter.set_result(None)


async def test_a_failure_is_heard_by_a_fetch_that_waits_for_a_rebalance(kafka: Kafka) -> None:
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        never_join(one)
        await eventually(lambda: one.source.group.rebalancing)
        hang(one.source)
        one.source.group.fail(BrokerUnavailable("seen by the watch"), "")
        await eventually(lambda: one.reopened == 1)
        await one.healthy("2 partitions, lag 0")


async def test_a_stop_does_not_wait_for_a_rebalance(kafka: Kafka) -> None:
    """Also for one that begins while `getmany` is under way."""
    name = await topic(kafka)
    async with member(kafka, name, new_name("group")) as one:
        source = one.source
        assert isinstance(source, KafkaSource)
        fetching = asyncio.create_task(source.fetch(10, 1000))
        await eventually(lambda: source._fetching)
        coordinator, over = source.group.consumer._coordinator, asyncio.Event()

        async def never(_: object) -> bool:
            await over.wait()
            await asyncio.sleep(0.01)  # without any suspension aiokafka's loop would never end
            return False

        coordinator._do_rejoin_group = never
        coordinator.request_rejoin()
        await eventually(lambda: source.group.rebalancing)
        hang(source)
        await source.stop()
        async with asyncio.timeout(5):
            assert await fetching == ()
        over.set()


# ------------------------------------------------------------------ blocked


async def test_one_message_that_never_ends_blocks_its_partition_and_is_named(
    kafka: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "streamfw.kafka")
    name, go_on = await topic(kafka, 1), asyncio.Event()
    await fill(kafka, name, numbers([0]), headers=[("streamfw-message-id", b"the-culprit")])
    await fill(kafka, name, numbers(range(1, 100)))

    async def handle(number: int) -> None:
        if number == 0:
            await go_on.wait()

    limits = {"open_limit": 10, "window_limit": 30}
    async with running(kafka, name, handling=handle, workers=4, prefetch=8, broker=limits) as one:
        await one.healthy(f"{name}-0 is full behind offset 0 (1 open)")
        count = len(one.done)
        assert 29 <= count < 60
        await one.unhealthy(f"{name}-0 is full behind offset 0 (1 open)")
        (status,) = one.source.partitions()
        assert (status.mark, status.blocking, status.open, status.lag) == (0, 0, 1, 100)
        await eventually(lambda: warnings_of(caplog, "is not read on"))
        looked = one.source.watch.clock + 1.0
        await eventually(lambda: one.source.watch.clock > looked)
        (told,) = warnings_of(caplog, "is not read on")
        assert f"{name}-0 is not read on. Offset 0 (message the-culprit) has not been settled since " in told
        assert "window_limit=30" in told and "open_limit=10" in told
        assert len(one.done) == count
        go_on.set()
        await eventually(lambda: len(one.done) == 100)
        await one.healthy("1 partition, lag 0")
        assert one.reopened == 0
        assert f"{name}-0 is read on" in caplog.text


async def test_a_blocking_that_lasts_is_told_again(
    kafka: Kafka, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REMIND", 0.5)
    name, go_on = await filled(kafka, 20, 1), asyncio.Event()
    async with running(kafka, name, handling=lambda _: go_on.wait(), broker={"open_limit": 3}) as one:
        await eventually(lambda: len(warnings_of(caplog, f"Offset 0 (message {name}-0-0)")) >= 2)
        go_on.set()
        await one.handled(20)
        await one.healthy("lag 0")


async def test_a_retry_topic_that_is_full_of_what_waits_is_no_trouble(kafka: Kafka) -> None:
    from streamfw import Retry

    name, group = await filled(kafka, 10, 1), new_name("group")

    async def later(_: int) -> None:
        raise Retry(after=3600)

    slow = Topic(name, retry_topic=True, retry_after=1.0)
    limits = {"open_limit": 3, "window_limit": 3, "partitions": 1}
    async with running(kafka, slow, handling=later, group=group, broker=limits, attempts=5) as one:
        await one.healthy(f"{name}.{group}.retry-0 is full of messages that wait")
        await one.stays_healthy(1.2)


# ------------------------------------------------------------------ the server


async def test_commits_that_are_not_accepted(kafka: Kafka) -> None:
    name = await topic(kafka, 1)
    async with running(kafka, name) as one:
        await one.healthy()
        consumer: Any = one.source.group.consumer
        commit = consumer.commit_once

        async def no_answer(*_: object) -> None:
            raise TimeoutError

        consumer.commit_once = no_answer
        await fill(kafka, name, numbers([1]))
        await one.unhealthy("commits are not accepted: Kafka: committing for group")
        consumer.commit_once = commit
        await one.healthy("lag 0")
        assert one.reopened == 0


async def test_a_question_that_fails(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await filled(kafka, 4)
    latest = Topics.latest

    async def away(topics: Topics, partitions: Any) -> Any:
        raise BrokerUnavailable("Kafka: asking for offsets: nobody there")

    async with running(kafka, name) as one:
        await one.handled(4)
        await one.healthy()
        monkeypatch.setattr(Topics, "latest", away)
        await never_fetch(one)
        await one.unhealthy("the server does not answer: Kafka: asking for offsets: nobody there")
        monkeypatch.setattr(Topics, "latest", latest)
        await one.healthy()
        assert one.reopened == 0  # where it ends is known: nothing was missed


async def test_a_topic_that_was_deleted(kafka: Kafka) -> None:
    name = await filled(kafka, 4, 1)
    async with running(kafka, Topic(name, partitions=[0])) as one:
        await one.handled(4)
        await one.healthy()
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([name])
        finally:
            await admin.close()
        await one.unhealthy(f"there is no partition {name}-0")


async def test_a_server_that_stands_still_and_goes_on(own_kafka: OwnKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER", 0.5)
    monkeypatch.setattr(watch, "ASK", 0.4)
    monkeypatch.setattr(watch, "QUIET", 1.0)
    kafka = own_kafka.facts
    name = await filled(kafka, 4)
    async with running(kafka, name) as one:
        await one.handled(4)
        await all_committed(kafka, name, one.app.settings.name)
        await one.healthy("lag 0")
        await asyncio.to_thread(own_kafka.freeze)
        try:
            await one.unhealthy("the server does not answer: nothing for 0.5 s")
            await one.unhealthy("no heartbeat was answered for ")
        finally:
            await asyncio.to_thread(own_kafka.thaw)
        await one.healthy("2 partitions, lag 0", deadline=30)
        await fill(kafka, name, numbers([4]))
        await eventually(lambda: 4 in one.done)


# ------------------------------------------------------------------ facts about aiokafka


def test_what_the_watch_and_the_consumer_rest_on() -> None:
    """See `GroupConsumer`: another version of aiokafka fails here."""

    def text_of(thing: Any) -> str:
        return inspect.getsource(thing)

    beats = text_of(group_coordinator.GroupCoordinator._heartbeat_routine)
    assert "success = await self._do_heartbeat()" in beats  # looked up anew each time, so it can be counted
    idle = text_of(subscription_state.SubscriptionState.fetcher_idle_time.fget)
    assert "time.monotonic() - self._last_fetch_ended" in idle
    join = text_of(group_coordinator.GroupCoordinator.ensure_active_group)
    assert "prev_assignment is not None and idle_time >= self._max_poll_interval" in join  # 1187
    heard = text_of(fetcher.Fetcher._proc_fetch_request)
    for set_here in ("tp_state.highwater = highwater", "tp_state.lso = lso", "tp_state.timestamp = now_ms"):
        assert set_here in heard
    abort = text_of(subscription_state.SubscriptionState.abort_waiters)
    assert "self._assignment_waiters" in abort and "self._fetch_waiters" in abort
    records = text_of(fetcher.Fetcher.fetched_records)
    assert "await self._subscriptions.wait_for_assignment()" in records
    assert "_fetch_task" not in records  # so nobody notices that it has ended
    assert QUICK["heartbeat"] < 0.5
