"""Pauses that RabbitMQ waits for: the ladder of retry queues, delayed publishing, and what counts as an attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfw import App, Backoff, Message, subscriber
from streamfw.broker import Settlement, Subscription
from streamfw.errors import Rejected, Unroutable, Unsupported
from streamfw.message import ERROR, ORIGIN_ATTEMPT
from streamfw.outcome import Retry
from streamfw.testing.conformance import Member
from streamfw_rabbit import Exchange, RabbitBroker, RabbitQueue, retry
from streamfw_rabbit.channel import Properties
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.delivery import RabbitDelivery
from streamfw_rabbit.headers import ATTEMPT, FROM, LEFT
from streamfw_rabbit.retry import LEVELS, LONGEST, Ladder, digits_of
from tests.brokers.rabbit_broker_kit import Raw, connected, member, new_name, outgoing, send, source_of
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services.rabbit import Rabbit

# ---------------------------------------------------------------------- the ladder


@given(st.floats(0, LONGEST + 1000, allow_nan=False))
def test_the_digits_of_a_pause_are_its_seconds(seconds: float) -> None:
    digits = digits_of(seconds).split(".")
    assert len(digits) == LEVELS
    value = int("".join(digits), 2)
    assert 1 <= value <= LONGEST
    if seconds <= LONGEST:
        assert seconds <= value < seconds + 1 or value == 1, "never earlier, and at most a second later"


def test_what_comes_from_a_ladder() -> None:
    async def bind(channel: object, last: str) -> None: ...

    ladder = Ladder("orders.shop.retry", bind)
    for exchange in ("orders.shop.retry", "orders.shop.retry.1000", "orders.shop.retry.4194304000"):
        assert ladder.is_from(exchange)
    for exchange in ("", "orders", "orders.shop.retryx", "orders.shop", "xorders.shop.retry"):
        assert not ladder.is_from(exchange)


async def test_every_pause_takes_its_time_and_passes_others(connection: RabbitConnection, other: Raw) -> None:
    """1, 2 and 3 seconds, the longest first: nothing waits behind a longer one."""
    name = new_name()
    async with member(connection, name) as taker:
        await send(connection, *(outgoing(name, b"%d" % n, headers={"tenant": "a"}) for n in (3, 2, 1)))
        taken = await taker.take(3)
        began = time.monotonic()
        group = [Settlement(delivery, Retry(float(delivery.body) - 0.3)) for delivery in taken]
        assert list(await taker.source.settle(group)) == []
        for expected in (1, 2, 3):
            (delivery,) = await taker.take(1)
            took = time.monotonic() - began
            assert int(delivery.body) == expected
            assert expected <= took + 0.3
            assert took < expected + 3
            assert (delivery.attempt, delivery.headers.pairs) == (2, (("tenant", b"a"),))
            assert isinstance(delivery, RabbitDelivery)
            assert (delivery.exchange, delivery.routing_key) == (name, name), "as at first"
            await taker.acknowledge([delivery])
        await other.left(f"{name}.shop", 0)
        assert await other.exists(f"{name}.shop.retry.1000")
        assert await other.exists(f"{name}.shop.retry.2000")
        assert not await other.exists(f"{name}.shop.retry.4000"), "only what is needed is made"


async def test_a_copy_is_stored_before_the_original_ends(rabbit: Rabbit, connection: RabbitConnection) -> None:
    """As long as it cannot be stored, the original is out; nothing is lost when the channel ends then."""
    name = new_name()
    async with member(connection, name) as taker:
        await send(connection, outgoing(name, b"x"))
        taken = await taker.take(1)
        rabbit.permit(write=f"^{name}([.]shop)?$")  # not to the retry queues
        assert await taker.settle(taken, Retry(5.0)) == []
        await eventually(lambda: not taker.source.health().ok)
        assert "cannot be put aside" in taker.source.health().detail
        assert [type(error).__name__ for error in await taker.settle(taken)] == ["StaleDelivery"], "it is on its way"
        await asyncio.to_thread(rabbit.close_connections)
        again = await taker.take(1)
        assert (again[0].message_id, again[0].attempt) == (taken[0].message_id, 1)
        rabbit.permit()
        await taker.acknowledge(again)


async def test_a_ladder_that_somebody_deletes_is_made_again(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()

    async def delete() -> None:
        channel = await other.channel()
        await channel.queue_delete(f"{name}.shop.retry.1000")
        await channel.exchange_delete(f"{name}.shop.retry.1000")

    await tried_twice(connection, name, 1.0, between=delete)


async def tried_twice(
    connection: RabbitConnection, name: str, pause: float, between: Callable[[], Awaitable[None]]
) -> None:
    """A message that comes again twice, each time after a pause; `between` runs before the second."""
    async with member(connection, name) as taker:
        await send(connection, outgoing(name, b"x"))
        for attempt in (1, 2):
            taken = await taker.take(1)
            assert taken[0].attempt == attempt
            if attempt == 2:
                await between()
            assert await taker.settle(taken, Retry(pause)) == []
        taken = await taker.take(1)
        assert taken[0].attempt == 3
        await taker.acknowledge(taken)


@pytest.mark.parametrize("gone", ["queue", "exchange", "end"])
async def test_a_part_of_the_ladder_that_is_deleted_is_made_again_before_it_is_used(
    connection: RabbitConnection, other: Raw, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish to the top is confirmed whatever is below."""
    monkeypatch.setattr(retry, "_TRUSTED", 0.0)
    name = new_name()

    async def delete() -> None:
        channel = await other.channel()
        if gone == "queue":
            await channel.queue_delete(f"{name}.shop.retry.1000")
        else:
            await channel.exchange_delete(f"{name}.shop.retry" + (".1000" if gone == "exchange" else ""))

    await tried_twice(connection, name, 3.0, between=delete)


async def test_what_waits_comes_to_a_queue_that_was_deleted_and_made_again(
    connection: RabbitConnection, other: Raw
) -> None:
    """The queue's bindings go with it, also that of its retry queues."""
    name = new_name()
    async with member(connection, name) as taker:
        await send(connection, outgoing(name, b"x"))
        assert await taker.settle(await taker.take(1), Retry(2.0)) == []
        await eventually(lambda: other.exists(f"{name}.shop.retry.2000"))
        await other.left(f"{name}.shop.retry.2000", 1)
        await other.delete(f"{name}.shop")
        taken = await taker.take(1)
        assert (taken[0].body, taken[0].attempt) == (b"x", 2)
        assert await taker.settle(taken, Retry(1.0)) == []
        (last,) = await taker.take(1)
        assert last.attempt == 3
        await taker.acknowledge([last])


async def test_retries_work_when_all_of_it_was_deleted(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        health = taker.source.health
        await send(connection, outgoing(name, b"0"))
        assert await taker.settle(await taker.take(1), Retry(1.0)) == []
        await taker.acknowledge(await taker.take(1))
        await taker.flush()
        await connection.withdraw(name, "shop")
        await eventually(lambda: not health().ok)
        taking = asyncio.create_task(taker.take(1))
        await eventually(lambda: health().ok)
        await send(connection, outgoing(name, b"1"))
        assert await taker.settle(await taking, Retry(1.0)) == []
        (again,) = await taker.take(1)
        assert (again.body, again.attempt) == (b"1", 2)
        await taker.acknowledge([again])


async def test_what_is_delayed_comes_to_a_queue_that_was_deleted_and_made_again(
    connection: RabbitConnection, other: Raw
) -> None:
    source = RabbitQueue(new_name("mail"))
    async with member(connection, source.name, source=source) as taker:
        await send(connection, outgoing(source.name, b"x", delay=2.0))
        await other.delete(source.name)
        (delivery,) = await taker.take(1)
        assert delivery.body == b"x"
        await taker.acknowledge([delivery])


async def test_attempts_in_a_header_count_only_from_our_retry_queues(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        forged = {ATTEMPT: 99, LEFT: 1000, "x-death": [{"queue": f"{name}.shop.retry.1000", "reason": "expired"}]}
        await other.publish(name, "", b"forged", forged)
        await other.publish("", f"{name}.shop", b"forged", forged)
        for delivery in await taker.take(2):
            assert (delivery.attempt, delivery.headers.pairs) == (1, ())
            await taker.acknowledge([delivery])
        await send(connection, outgoing(name))
        assert await taker.settle(await taker.take(1), Retry(0.0)) == []
        (delivery,) = await taker.take(1)
        assert delivery.attempt == 2
        await taker.acknowledge([delivery])
        channel = await other.channel()
        with pytest.raises(Exception, match="cannot publish to internal exchange"):
            await channel.basic_publish(b"x", exchange=f"{name}.shop.retry", routing_key="")


async def test_headers_of_any_type_come_back_as_they_were(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    async with member(connection, name) as taker:
        headers = {"n": 42, "flag": True, "nested": {"a": [1, "b"]}, "x-tenant": "acme", "CC": [new_name("nobody")]}
        await other.publish(name, "key", b"x", headers, message_type="order", expiration="600000")
        before = await taker.take(1)
        assert await taker.settle(before, Retry(0.0)) == []
        (after,) = await taker.take(1)
        assert isinstance(after, RabbitDelivery)
        assert isinstance(before[0], RabbitDelivery)
        assert after.headers.pairs == before[0].headers.pairs
        table = after.properties.headers
        assert {name: table[name] for name in ("n", "flag", "nested", "x-tenant")} == {
            "n": 42,
            "flag": True,
            "nested": {"a": [1, "b"]},
            "x-tenant": "acme",
        }
        assert (after.properties.message_type, after.properties.expiration) == ("order", None)
        assert "CC" not in table
        assert (after.exchange, after.routing_key) == (name, "key")
        await taker.acknowledge([after])


async def test_a_pause_beyond_the_longest_is_waited_for_again(connection: RabbitConnection) -> None:
    """What comes from the ladder with time left goes there once more, and nobody handles it before."""
    name = new_name()
    async with member(connection, name) as taker:
        ladder = source_of(taker)._ladder
        assert ladder is not None
        exchange, key = await ladder.way(connection.consuming, 1)
        table: dict[str, object] = {ATTEMPT: 3, LEFT: 2, FROM: [name, "k"]}
        properties = Properties(raw_headers=table, message_id="m")  # type: ignore[arg-type]
        began = time.monotonic()
        assert await connection.publishing.send(exchange, key, outgoing(name, b"x"), properties) is None
        (delivery,) = await taker.take(1)
        assert time.monotonic() - began >= 3
        assert (delivery.attempt, delivery.message_id, delivery.body) == (3, "m", b"x")
        assert isinstance(delivery, RabbitDelivery)
        assert (delivery.exchange, delivery.routing_key) == (name, "k")
        await taker.acknowledge([delivery])


async def test_where_nothing_may_be_declared_nothing_is_taken_back(connection: RabbitConnection, other: Raw) -> None:
    source = RabbitQueue(await other.declare(new_name("there")), declare="off")
    async with member(connection, source.name, source=source) as taker:
        await send(connection, outgoing(source.name))
        taken = await taker.take(1)
        with pytest.raises(Unsupported):
            await taker.source.settle([Settlement(taken[0], Retry(1.0))])
        await taker.acknowledge(taken)


# ---------------------------------------------------------------------- in an app


async def test_attempts_go_on_in_the_next_process(rabbit: Rabbit, transport: TransportName) -> None:
    """A message that waits on the server survives its process, with the attempts that it has had."""
    name = new_name()
    attempts: list[int] = []
    letters: list[Message] = []

    @subscriber(name, attempts=3, backoff=Backoff(first=1.0, factor=1.0, jitter=False))
    async def fail(message: Message) -> None:
        attempts.append(message.attempt)
        raise ValueError("always")

    @subscriber(f"{name}.dead")
    async def bury(message: Message) -> None:
        letters.append(message)

    def app() -> App:
        return App(fail, bury, name="shop", brokers={"default": RabbitBroker(rabbit.url, transport=transport)})

    async with app().running() as first:
        await first.publish(name, {"id": 1})
        await eventually(lambda: attempts)
    async with app().running():
        await eventually(lambda: letters, 20)
    assert attempts == [1, 2, 3]
    assert letters[0].headers[ORIGIN_ATTEMPT] == "3"
    assert letters[0].headers[ERROR] == "ValueError: always"


# ---------------------------------------------------------------------- delayed publishing


async def test_a_delayed_publish_reaches_every_group(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name, "one") as one, member(connection, name, "two") as two:
        began = time.monotonic()
        message = outgoing(name, b"later", delay=1.5, key="k", headers={"tenant": "a"})
        assert await send(connection, message, outgoing(name, b"now")) == [None, None]
        for taker in (one, two):
            now, later = await taker.take(2)
            assert (now.body, later.body) == (b"now", b"later")
            assert time.monotonic() - began >= 1.5
            assert (later.key, later.attempt, later.message_id) == ("k", 1, message.message_id)
            assert later.headers.pairs == (("tenant", b"a"),)
            assert isinstance(later, RabbitDelivery)
            assert (later.exchange, later.routing_key) == (name, "k")
            await taker.acknowledge([now, later])


async def test_a_delayed_publish_to_a_queue(connection: RabbitConnection, other: Raw) -> None:
    queue = await other.declare(new_name("queue"))
    assert await send(connection, outgoing(queue, b"later", delay=0.5)) == [None]
    assert await other.depth(queue) == 0
    await other.left(queue, 1)


async def test_what_cannot_be_delayed_is_rejected(connection: RabbitConnection, rabbit: Rabbit) -> None:
    name, topic = new_name(), new_name("topic")
    bound = RabbitQueue(new_name("queue"), exchange=Exchange(topic, "topic"), bind="#")
    async with member(connection, name), member(connection, bound.name, source=bound):
        answers = await send(
            connection,
            outgoing(topic, delay=1.0),
            outgoing(name, delay=LONGEST + 1.0),
            outgoing(name, delay=float(LONGEST)),
        )
        assert answers == [Rejected, Rejected, None]
        (of_keys,) = await connection.publish([outgoing(topic, delay=1.0)])
        assert f"'{topic}' is an exchange that routes by keys" in str(of_keys)
        assert await send(connection, outgoing(new_name("nobody"), delay=1.0)) == [Unroutable]
        async with connected(rabbit, declare="off") as careful:
            assert await send(careful, outgoing(name, delay=1.0)) == [Rejected]


async def test_a_group_that_is_withdrawn_leaves_no_retry_queues(connection: RabbitConnection, other: Raw) -> None:
    name = new_name()
    taker = Member(connection, await connection.open(Subscription(name, "shop", workers=2)), 20.0)
    await send(connection, outgoing(name, b"1"), outgoing(name, b"2"))
    first, second = await taker.take(2)
    assert await taker.settle([first], Retry(60.0)) == []
    await taker.flush()
    await taker.source.close()
    await other.left(f"{name}.shop", 1)
    assert await connection.withdraw(name, "shop") == 2
    for queue in (f"{name}.shop", f"{name}.shop.retry.32000"):
        assert not await other.exists(queue)
    assert await connection.withdraw(name, "shop") == 0
    del second
