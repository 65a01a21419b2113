"""What MemoryBroker has of its own, beyond the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import pytest

from streamfw.broker import Connection, Delivery, Settlement, Source, Subscription
from streamfw.errors import Blocked, BrokerClosed, BrokerRefused, LeaseLost, Rejected, TooLarge, Unsupported
from streamfw.memory import MemoryBroker
from streamfw.message import ERROR, Headers, Outgoing, new_message_id
from streamfw.outcome import ACK, RELEASE, DeadLetter, Drop, Outcome, Retry
from tests.helpers import eventually

MIB = 2**20


def outgoing(name: str = "orders", body: bytes = b"x", **fields: Any) -> Outgoing:
    return Outgoing(name=name, body=body, **{"message_id": new_message_id(), **fields})


@asynccontextmanager
async def opened(broker: MemoryBroker, **options: Any) -> AsyncIterator[tuple[Connection, Source]]:
    async with broker.connect() as connection:
        yield connection, await connection.open(Subscription("orders", **options))


async def settle(source: Source, deliveries: Sequence[Delivery], outcome: Outcome = ACK) -> None:
    assert not await source.settle([Settlement(delivery, outcome) for delivery in deliveries])


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def numbered(*numbers: int, **fields: Any) -> list[Outgoing]:
    return [outgoing(body=b"%d" % number, **fields) for number in numbers]


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize("url", ["memory:", "redis://", "memory://a?b=c", ""])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="memory:// or memory://name"):
        MemoryBroker(url)


@pytest.mark.parametrize("option", [{"max_messages": 0}, {"max_bytes": 0}, {"max_body": -1}, {"publish_timeout": -0.1}])
def test_a_wrong_limit_is_named(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        MemoryBroker(**option)  # type: ignore[arg-type]


async def test_brokers_of_one_name_share_and_others_do_not() -> None:
    async with opened(MemoryBroker("memory://shared")) as (connection, _):
        await connection.publish([outgoing(body=b"for all of that name")])
        for url, expected in (("memory://other", 0), ("memory://", 0), ("memory://shared", 1)):
            async with MemoryBroker(url).connect() as another:
                assert (await another.check()).detail.startswith(f"{expected} of ")


async def test_a_named_store_ends_with_its_last_broker() -> None:
    first = MemoryBroker("memory://brief")
    async with opened(first) as (connection, _):
        await connection.publish([outgoing()])
    del first, connection, _
    async with MemoryBroker("memory://brief").connect() as connection:
        assert (await connection.check()).detail.startswith("0 of ")


async def test_another_event_loop_is_refused_while_one_is_connected() -> None:
    broker = MemoryBroker()
    errors: list[BaseException] = []

    async def connect() -> None:
        async with broker.connect():
            pass

    def in_a_thread() -> None:
        try:
            asyncio.run(connect())
        except BrokerRefused as error:
            errors.append(error)

    async with broker.connect():
        thread = Thread(target=in_a_thread)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert "another event loop" in str(errors[0])
    await asyncio.to_thread(asyncio.run, connect())


async def test_what_it_cannot_do_is_refused() -> None:
    async with MemoryBroker().connect() as connection:
        with pytest.raises(Unsupported, match="partitions"):
            await connection.open(Subscription("orders", ordered_by="partition"))
        with pytest.raises(BrokerRefused, match="needs a name"):
            await connection.open(Subscription("orders", ""))
        with pytest.raises(BrokerRefused, match="not a source of MemoryBroker"):
            await connection.open(Subscription("orders", source=object()))


# ------------------------------------------------------------------ order of what comes back


async def test_what_comes_back_is_in_front_and_in_order() -> None:
    async with opened(MemoryBroker()) as (connection, source):
        await connection.publish(numbered(*range(6)))
        taken = list(await source.fetch(4, MIB))
        await settle(source, [taken[2]], RELEASE)
        await settle(source, [taken[0]], Retry(0.0))
        await settle(source, [taken[3], taken[1]], RELEASE)
        assert bodies(await source.fetch(10, MIB)) == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_smaller_priority_comes_first_also_when_it_comes_back() -> None:
    async with opened(MemoryBroker()) as (connection, source):
        await connection.publish([*numbered(5, priority=5), *numbered(0, 1), *numbered(-7, priority=-7)])
        taken = list(await source.fetch(3, MIB))
        assert bodies(taken) == [b"-7", b"0", b"1"]
        await settle(source, taken, RELEASE)
        await connection.publish(numbered(2))
        assert bodies(await source.fetch(10, MIB)) == [b"-7", b"0", b"1", b"2", b"5"]


async def test_one_timer_serves_all_delays_in_order() -> None:
    async with opened(MemoryBroker()) as (connection, source):
        delays = (0.12, 0.04, 0.08)
        await connection.publish([outgoing(body=b"%d" % (delay * 100), delay=delay) for delay in delays])
        waiting = asyncio.create_task(_fetch_all(source, 3))
        assert await waiting == [b"4", b"8", b"12"]


async def test_a_delay_ends_also_for_a_source_that_never_waited() -> None:
    async with opened(MemoryBroker()) as (connection, source):
        await connection.publish([outgoing(body=b"later", delay=0.02)])

        async def due() -> bool:
            await connection.publish([outgoing(body=b"busy")])
            taken = await source.fetch(10, MIB)
            return b"later" in bodies(taken)

        await eventually(due)


async def _fetch_all(source: Source, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += bodies(await source.fetch(10, MIB))
    return found


async def test_a_message_larger_than_the_bytes_asked_comes_alone() -> None:
    async with opened(MemoryBroker()) as (connection, source):
        await connection.publish([outgoing(body=bytes(size)) for size in (10, 5_000, 10, 10)])
        sizes = [[len(body) for body in bodies(await source.fetch(10, 1_000))] for _ in range(3)]
        assert sizes == [[10], [5_000], [10, 10]]


# ------------------------------------------------------------------ competing and standing by


async def test_waiting_sources_are_woken_in_turn() -> None:
    broker = MemoryBroker()
    async with opened(broker) as (connection, first), opened(broker) as (_, second), opened(broker) as (_, third):
        waiting = [asyncio.create_task(_fetch_one(source)) for source in (first, second, third)]
        await asyncio.sleep(0)
        await connection.publish(numbered(1, 2, 3))
        assert await asyncio.gather(*waiting) == [b"1", b"2", b"3"]


async def _fetch_one(source: Source) -> bytes:
    (delivery,) = await source.fetch(1, MIB)
    return bytes(delivery.body)


async def test_a_wake_that_a_stopped_source_got_is_passed_on() -> None:
    broker = MemoryBroker()
    async with opened(broker) as (connection, first), opened(broker) as (_, second):
        stopping = asyncio.create_task(_fetch_count(first))
        await asyncio.sleep(0)
        other = asyncio.create_task(_fetch_count(second))
        await asyncio.sleep(0)
        await connection.publish(numbered(1))
        await first.stop()
        assert await stopping == 0
        assert await asyncio.wait_for(other, 5) == 1


async def _fetch_count(source: Source) -> int:
    return len(await source.fetch(1, MIB))


async def test_the_standby_takes_over_with_what_was_out() -> None:
    broker = MemoryBroker()
    async with (
        opened(broker, ordered_by="key") as (connection, owner),
        opened(broker, ordered_by="key") as (_, standby),
    ):
        assert owner.health().ok
        assert "standing by" in standby.health().detail
        await connection.publish(numbered(1, 2, 3, key="k"))
        taken = list(await owner.fetch(2, MIB))
        waiting = asyncio.create_task(_fetch_all(standby, 3))
        await asyncio.sleep(0)
        assert not waiting.done()
        await owner.close()
        assert all(delivery.lost for delivery in taken)
        assert await waiting == [b"1", b"2", b"3"]
        assert standby.health().detail == ""


async def test_a_late_settlement_does_not_touch_the_next_delivery() -> None:
    broker = MemoryBroker()
    async with opened(broker) as (connection, source):
        await connection.publish([outgoing()])
        (early,) = await source.fetch(1, MIB)
        await settle(source, [early], Retry(0.0))
        (late,) = await source.fetch(1, MIB)
        (error,) = await source.settle([Settlement(early, ACK)])
        assert type(error) is LeaseLost
        assert error.delivery is early
        await settle(source, [late])
        assert (await connection.check()).detail.startswith("0 of ")


# ------------------------------------------------------------------ room


async def test_a_full_broker_makes_the_publisher_wait() -> None:
    async with opened(MemoryBroker(max_messages=2)) as (connection, source):
        publishing = asyncio.create_task(_publish(connection, numbered(*range(5))))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not publishing.done()
        found: list[bytes] = []
        while len(found) < 5:
            taken = await source.fetch(1, MIB)
            found += bodies(taken)
            await settle(source, taken)
        assert await publishing == []
        assert found == [b"0", b"1", b"2", b"3", b"4"]


async def _publish(connection: Connection, messages: Sequence[Outgoing]) -> list[type]:
    return [type(answer) for answer in await connection.publish(messages) if answer is not None]


async def test_publishers_that_wait_are_served_in_order() -> None:
    async with opened(MemoryBroker(max_messages=1)) as (connection, source):
        await connection.publish(numbered(0))
        waiting = []
        for number in range(1, 6):
            waiting.append(asyncio.create_task(_publish(connection, numbered(number))))
            await asyncio.sleep(0)
        found: list[bytes] = []
        while len(found) < 6:
            taken = await source.fetch(1, MIB)
            found += bodies(taken)
            await settle(source, taken)
        assert found == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert await asyncio.gather(*waiting) == [[]] * 5


@pytest.mark.parametrize("limit", [{"max_messages": 2}, {"max_bytes": 6}])
async def test_after_the_timeout_each_message_is_answered_with_blocked(limit: dict[str, int]) -> None:
    async with opened(MemoryBroker(publish_timeout=0.02, max_body=3, **limit)) as (connection, source):  # type: ignore[arg-type]
        messages = [outgoing(body=b"abc") for _ in range(4)] + [outgoing(body=b"too large")]
        answers = await connection.publish(messages)
        assert [type(answer) for answer in answers] == [type(None), type(None), Blocked, Blocked, TooLarge]
        assert messages[2].message_id in str(answers[2])
        assert "is full (2 of" in str(answers[2])
        taken = await source.fetch(10, MIB)
        assert len(taken) == 2
        await settle(source, taken, Drop())
        assert await _publish(connection, messages[2:4]) == []


async def test_every_group_takes_room() -> None:
    broker = MemoryBroker(max_messages=3, publish_timeout=0.0)
    async with opened(broker, group="a") as (connection, _), opened(broker, group="b"):
        assert await _publish(connection, numbered(1, 2)) == [Blocked]
        assert (await connection.check()).detail.startswith("2 of 3 messages")


async def test_an_empty_broker_takes_any_message() -> None:
    broker = MemoryBroker(max_messages=1, publish_timeout=0.0)
    async with opened(broker, group="a") as (connection, _), opened(broker, group="b"):
        assert await _publish(connection, numbered(1)) == []


async def test_a_dead_letter_needs_no_room() -> None:
    broker = MemoryBroker(max_messages=1, publish_timeout=0.0)
    async with opened(broker, dead_letter="orders.dead") as (connection, source):
        await connection.publish(numbered(1))
        await settle(source, await source.fetch(1, MIB), DeadLetter("broken"))
        assert await _publish(connection, numbered(2)) == [Blocked], "it takes room as any message does"
        letters = await connection.dead_letters("orders.dead")
        assert await letters.requeue() == 1
        assert bodies(await source.fetch(1, MIB)) == [b"1"]


async def test_closing_ends_a_publish_that_waits() -> None:
    async with MemoryBroker(max_messages=1).connect() as connection:
        await connection.publish(numbered(1))
        publishing = asyncio.create_task(_publish(connection, numbered(2)))
        await asyncio.sleep(0)
    with pytest.raises(BrokerClosed):
        await publishing


async def test_a_cancelled_publisher_does_not_hold_up_the_next() -> None:
    async with opened(MemoryBroker(max_messages=1)) as (connection, source):
        await connection.publish(numbered(1))
        first = asyncio.create_task(_publish(connection, numbered(2)))
        await asyncio.sleep(0)
        second = asyncio.create_task(_publish(connection, numbered(3)))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await settle(source, await source.fetch(1, MIB))
        assert await second == []
        assert bodies(await source.fetch(1, MIB)) == [b"3"]


async def test_a_body_that_is_not_bytes_is_rejected() -> None:
    async with opened(MemoryBroker()) as (connection, _):
        (error,) = await connection.publish([outgoing(body="text")])  # type: ignore[arg-type]
        assert type(error) is Rejected
        assert "not str" in str(error)


async def test_room_is_given_back_to_the_byte() -> None:
    async with opened(MemoryBroker(), dead_letter="orders.dead") as (connection, source):
        headers = Headers({"a": b"12345"})
        await connection.publish([outgoing(body=bytes(number), headers=headers) for number in range(50)])
        taken = list(await source.fetch(50, MIB))
        await settle(source, taken[:10])
        await settle(source, taken[10:20], Drop())
        await settle(source, taken[20:30], DeadLetter("broken"))
        await settle(source, taken[30:40], Retry(0.0))
        await settle(source, taken[40:], RELEASE)
        await settle(source, await source.fetch(50, MIB))
        assert await (await connection.dead_letters("orders.dead")).purge() == 10
        assert (await connection.check()).detail.startswith("0 of 100000 messages, 0 of ")


# ------------------------------------------------------------------ dead letters


async def test_dead_letters_are_listed_once_although_each_group_has_its_copy() -> None:
    broker = MemoryBroker()
    async with opened(broker, dead_letter="orders.dead") as (connection, source):
        for group in ("a", "b"):
            await connection.open(Subscription("orders.dead", group))
        await connection.publish(numbered(1, 2))
        await settle(source, await source.fetch(2, MIB), DeadLetter("broken"))
        letters = await connection.dead_letters("orders.dead")
        assert [message.body for message in await letters.list()] == [b"1", b"2"]
        assert await letters.requeue() == 2
        assert await letters.purge() == 0
        assert bodies(await source.fetch(10, MIB)) == [b"1", b"2"]


async def test_a_letter_that_does_not_say_where_it_came_from_stays() -> None:
    async with MemoryBroker().connect() as connection:
        await connection.publish(
            [outgoing("orders.dead"), outgoing("orders.dead", headers=Headers({"streamfw-origin": b"\xff"}))]
        )
        letters = await connection.dead_letters("orders.dead")
        assert await letters.requeue() == 0
        assert len(await letters.list()) == 2
        assert await letters.purge() == 2


async def test_a_requeued_letter_comes_after_what_waits_and_may_die_again() -> None:
    async with opened(MemoryBroker(), dead_letter="orders.dead", group="shop") as (connection, source):
        await connection.publish(numbered(1))
        await settle(source, await source.fetch(1, MIB), DeadLetter("first"))
        await (await connection.dead_letters("orders.dead")).requeue()
        await settle(source, await source.fetch(1, MIB), DeadLetter("second"))
        (letter,) = await (await connection.dead_letters("orders.dead")).list()
        assert letter.headers.all(ERROR) == [b"second"]


async def test_purge_finds_delayed_letters_too() -> None:
    async with MemoryBroker().connect() as connection:
        await connection.publish([outgoing("orders.dead", delay=100.0), outgoing("orders.dead", priority=3)])
        letters = await connection.dead_letters("orders.dead")
        assert len(await letters.list()) == 2
        assert await letters.purge() == 2
        assert await letters.list() == []
