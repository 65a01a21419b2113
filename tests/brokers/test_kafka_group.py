"""Consumer groups: sharing, handing over, static members, what keeps one out, and leaving when nobody answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

from streamfw import App, subscriber
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable
from streamfw.testing.conformance._kit import Member
from streamfw_kafka import KafkaBroker, Topic, nodes, opening
from streamfw_kafka.group import Membership
from streamfw_kafka.settings import Settings, client_arguments
from tests.brokers.kafka_apps import (
    GROUP,
    QUICK,
    all_committed,
    app_of,
    broker_of,
    committed,
    fill,
    filled,
    member,
    numbers,
    offsets,
    source_of,
    subscription,
    topic,
)
from tests.brokers.kafka_kit import desk, login_url, new_name
from tests.helpers import eventually
from tests.services.kafka import Kafka, OwnKafka


def group_of(one: Member) -> Membership:
    source: Any = one.source
    group: Membership = source.group
    return group


def parts_of(one: Member) -> set[int]:
    """Its partitions; none while they move."""
    group = group_of(one)
    return {tp.partition for tp in group.parts} if group.gate else set()


# ------------------------------------------------------------------ sharing


async def test_two_subscribers_of_an_app_in_one_group(kafka: Kafka) -> None:
    """They are members of the same group with different topics: each rebalance concerns both."""
    one, two = await filled(kafka, 60, 3), await filled(kafka, 40, 2)
    seen: Counter[tuple[str, int]] = Counter()

    @subscriber(one)
    async def first(number: int) -> None:
        seen["first", number] += 1

    @subscriber(two)
    async def second(number: int) -> None:
        seen["second", number] += 1

    app = app_of(kafka, first, second)
    async with app.running():
        await all_committed(kafka, one)
        await all_committed(kafka, two)
        assert {tp.topic for tp in source_of(app, 0).group.parts} == {one}
        assert {tp.topic for tp in source_of(app, 1).group.parts} == {two}
        async with member(kafka, one, GROUP) as other:
            await eventually(lambda: len(parts_of(other)) in (1, 2))
            await eventually(lambda: source_of(app, 1).group.gate and len(source_of(app, 1).group.parts) == 2)
        await fill(kafka, one, numbers(range(60, 90)))
        await fill(kafka, two, numbers(range(40, 60)))
        await all_committed(kafka, one)
        await all_committed(kafka, two)
    assert seen == Counter([*(("first", n) for n in range(90)), *(("second", n) for n in range(60))])


async def test_two_apps_share_and_nothing_is_done_twice(kafka: Kafka) -> None:
    name = await filled(kafka, 400, 4)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def app(which: str) -> App:
        @subscriber(name, workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.002)
            seen[which].append(number)

        return app_of(kafka, handle, rebalance_drain=5.0)

    async with app("a").running() as first:
        await eventually(lambda: len(seen["a"]) > 20)
        async with app("b").running() as second:
            await eventually(lambda: [len(source_of(each).group.parts) for each in (first, second)] == [2, 2])
            await fill(kafka, name, numbers(range(400, 600)))
            await all_committed(kafka, name)
            assert seen["b"]
        await eventually(lambda: len(source_of(first).group.parts) == 4)
        await fill(kafka, name, numbers(range(600, 700)))
        await all_committed(kafka, name)
    assert sorted(seen["a"] + seen["b"]) == list(range(700))


async def test_what_runs_when_partitions_return_counts(kafka: Kafka) -> None:
    """Longer than the drain: the partition comes back to the same member, and its settlement is taken."""
    name, group = await filled(kafka, 40, 4), new_name("group")
    async with member(kafka, name, group) as one:
        taken = await one.take(40)
        async with member(kafka, name, group) as two:
            await eventually(lambda: [len(parts_of(each)) for each in (one, two)] == [2, 2])
            mine = parts_of(one)
            errors = await one.settle(taken)
            assert sorted(offsets(error.delivery for error in errors)) == sorted(
                (p, at) for p in set(range(4)) - mine for at in range(10)
            )
            assert group_of(one).kept == 2
            await two.acknowledge(await two.take(20))
    assert await committed(kafka, name, group) == dict.fromkeys(range(4), 10)


# ------------------------------------------------------------------ leaving


async def test_who_leaves_hands_over_at_once(kafka: Kafka) -> None:
    """Not after a session timeout, which is longer than this test may take."""
    name, group, broker = await filled(kafka, 20, 4), new_name("group"), broker_of(kafka, session_timeout=300.0)
    async with member(kafka, name, group, broker=broker) as one:
        async with member(kafka, name, group, broker=broker) as two:
            await eventually(lambda: [len(parts_of(each)) for each in (one, two)] == [2, 2])
        await eventually(lambda: len(parts_of(one)) == 4)


async def test_who_leaves_while_partitions_move_is_not_waited_for(kafka: Kafka) -> None:
    """Its join waits for a slow member, and the server reads nothing more on that connection. It leaves by another."""
    name, group = await filled(kafka, 20, 4), new_name("group")
    broker = broker_of(kafka, session_timeout=300.0, rebalance_drain=100.0, rebalance_timeout=200.0)
    began, let_go = asyncio.Event(), asyncio.Event()

    @subscriber(name, group=group)
    async def handle(number: int) -> None:
        began.set()
        await let_go.wait()

    app = App(handle, brokers={"default": broker}, drain_timeout=5.0)
    async with app.running():
        await began.wait()
        joining = broker_of(kafka, session_timeout=300.0, rebalance_timeout=200.0, connect_timeout=0.5)
        async with member(kafka, name, group, broker=joining) as two:  # which waits for the handler
            assert not group_of(two).gate
        let_go.set()
        await eventually(lambda: source_of(app).group.gate and len(source_of(app).group.parts) == 4)
        async with desk(kafka.url) as asked:
            assert len((await asked.topics.group(group)).members) == 1


async def test_stopping_while_partitions_move_blocks_nobody(kafka: Kafka) -> None:
    """What is settled is flushed when the gate opens again, or not at all: the event loop goes on meanwhile."""
    name, group = await filled(kafka, 20, 4), new_name("group")
    async with member(kafka, name, group) as one:
        taken = await one.take(20)
        membership = group_of(one)
        await membership.on_partitions_revoked(set(membership.parts))
        await one.acknowledge(taken)
        await one.source.stop()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await one.source.flush(asyncio.get_running_loop().time() + 0.3)
        ticking.cancel()
        assert ticks > 5
        await membership.on_partitions_assigned(set(membership.consumer.assignment()))
    assert await committed(kafka, name, group) == dict.fromkeys(range(4), 5)


@pytest.mark.parametrize("away", ["frozen", "killed"])
async def test_closing_is_bounded_while_the_server_is_away(own_kafka: OwnKafka, away: str) -> None:
    kafka = own_kafka.facts
    name = await filled(kafka, 20)
    seen: list[int] = []

    @subscriber(name)
    async def handle(number: int) -> None:
        seen.append(number)

    app = app_of(kafka, handle, drain_timeout=1.0)
    loop = asyncio.get_running_loop()
    async with app.running():
        await eventually(lambda: len(seen) == 20)
        await asyncio.to_thread(own_kafka.freeze if away == "frozen" else own_kafka.kill)
        left = loop.time()
    # The drain, its grace, five seconds for each step of closing: what App.running promises, not how fast it is.
    assert loop.time() - left < 1 + 5 + 3 * 5
    assert not [task for task in asyncio.all_tasks() if "aiokafka" in repr(task.get_coro())]


# ------------------------------------------------------------------ static members


@asynccontextmanager
async def static(kafka: Kafka, name: str | Topic, group: str, who: str, **options: Any) -> AsyncIterator[Member]:
    async with member(kafka, name, group, broker=broker_of(kafka, static_member=who, **options)) as one:
        yield one


async def test_a_static_member_that_restarts_moves_no_partition(kafka: Kafka) -> None:
    name, group = await filled(kafka, 40, 4), new_name("group")
    async with static(kafka, name, group, "one", session_timeout=60.0) as one, AsyncExitStack() as stack:
        two = await stack.enter_async_context(static(kafka, name, group, "two", session_timeout=60.0))
        await eventually(lambda: [len(parts_of(each)) for each in (one, two)] == [2, 2])
        before, theirs = group_of(one).rebalances, parts_of(two)
        await two.acknowledge(await two.take(20))
        await stack.aclose()
        async with static(kafka, name, group, "two", session_timeout=60.0) as again:
            await eventually(lambda: parts_of(again) == theirs)
            assert group_of(one).rebalances == before
            await fill(kafka, name, [b"new"], partition=min(theirs))
            assert offsets(await again.take(1)) == [(min(theirs), 10)]


async def test_a_static_member_may_have_any_subscriber(kafka: Kafka) -> None:
    """Whatever its name is and however long: the server has rules for names of members, too."""
    name = await filled(kafka, 10)
    for called in ("every one", "x" * 249):
        async with static(kafka, Topic(called, pattern=name), new_name("group"), "w" * 240) as one:
            assert len(await one.take(10)) == 10


async def test_two_processes_with_one_static_member_are_told(kafka: Kafka) -> None:
    """They throw each other out; one of them ends with an error that says why, and the other goes on."""
    name, group = await filled(kafka, 40, 4), new_name("group")
    async with AsyncExitStack() as stack:
        both = [await entered(stack, partial(static, kafka, name, group, "same")) for _ in range(2)]
        polls = [asyncio.create_task(poll_for_ever(one)) for one in both]
        done, _ = await asyncio.wait(polls, timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
        for poll in polls:
            poll.cancel()
        errors = [poll.exception() for poll in done]
        assert errors and all(isinstance(error, BrokerRefused) for error in errors)
        assert "another process uses static_member='same' as well; give each process its own" in str(errors[0])


async def entered(stack: AsyncExitStack, make: Callable[[], AbstractAsyncContextManager[Member]]) -> Member:
    """As an app does: what passes is tried again. To one of two that are thrown out in the middle of a join the server
    answers with an unknown error (-1) now and then."""
    while True:
        try:
            return await stack.enter_async_context(make())
        except BrokerUnavailable:
            await asyncio.sleep(0.1)


async def poll_for_ever(one: Member) -> None:
    while True:
        try:
            await one.acknowledge(await one.poll(1.0))
        except BrokerUnavailable:
            await one.source.reopen()


# ------------------------------------------------------------------ what keeps one out


async def refused(kafka: Kafka, broker: KafkaBroker, group: str, name: str) -> str:
    """Why an app is refused when it starts."""

    @subscriber(name, group=group)
    async def handle(number: int) -> None: ...

    with pytest.raises(BrokerError) as raised:
        async with App(handle, brokers={"default": broker}).running():
            pytest.fail("it runs")
    assert isinstance(raised.value, BrokerRefused), raised.value
    return str(raised.value)


async def test_a_wrong_password_is_terminal(kafka: Kafka) -> None:
    name = await topic(kafka)
    for login in kafka.logins.values():
        broker = KafkaBroker(login_url(kafka.sasl, login, password="wr0ng"), **QUICK)
        said = await refused(kafka, broker, new_name("group"), name)
        assert "check user, password and sasl= in the URL" in said and "wr0ng" not in said


async def test_a_password_that_is_wrong_by_now_is_terminal_when_joining(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections for questions are open still. Of a login that was refused aiokafka only says that it is "unable
    to bootstrap"."""
    name, login = await topic(kafka), kafka.logins["SCRAM-SHA-256"]
    async with KafkaBroker(login_url(kafka.sasl, login), **QUICK).connect() as connection:

        def changed(settings: Settings) -> dict[str, Any]:
            return client_arguments(settings) | {"sasl_plain_password": "wr0ng"}

        for module in (nodes, opening):
            monkeypatch.setattr(module, "client_arguments", changed)
        with pytest.raises(BrokerRefused, match="check user, password and sasl="):
            await connection.open(subscription(name, new_name("group")))


async def test_members_with_another_assignor_are_terminal(kafka: Kafka) -> None:
    name, group = await topic(kafka), new_name("group")
    foreign = AIOKafkaConsumer(
        name,
        bootstrap_servers=kafka.bootstrap,
        group_id=group,
        partition_assignment_strategy=(RoundRobinPartitionAssignor,),
    )
    await foreign.start()
    try:
        await eventually(foreign.assignment)
        said = await refused(kafka, broker_of(kafka), group, name)
        assert "members of this group use another assignor or protocol: use another group=" in said
    finally:
        await foreign.stop()


async def test_a_session_timeout_that_the_server_does_not_allow_is_terminal(kafka: Kafka) -> None:
    said = await refused(kafka, broker_of(kafka, session_timeout=0.6), new_name("group"), await topic(kafka))
    assert "set session_timeout= between" in said


async def test_a_group_that_turns_out_to_be_of_another_kind_ends_a_running_source(kafka: Kafka) -> None:
    """Terminal also when it is found later: not a source that waits in silence for ever."""
    name, group = await topic(kafka), new_name("group")
    async with member(kafka, name, group) as one:
        coordinator = group_of(one).consumer._coordinator
        coordinator._session_timeout_ms = 600
        coordinator.request_rejoin()
        with pytest.raises(BrokerRefused, match="set session_timeout= between"):
            await one.take(1)
