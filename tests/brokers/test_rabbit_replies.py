"""Requests and replies over RabbitMQ's direct reply-to."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from pamqp import commands

from streamfw import App, Message, NotRunning, Outgoing, ReplyTimeout, Retry, Unroutable, subscriber
from streamfw.errors import BrokerUnavailable
from streamfw.message import new_message_id
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.connection import RabbitConnection
from tests.brokers.rabbit_broker_kit import new_name, raw
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services.rabbit import Rabbit


@pytest.fixture
def broker(rabbit: Rabbit, transport: TransportName) -> RabbitBroker:
    return RabbitBroker(rabbit.url, transport=transport)


class Query(msgspec.Struct):
    number: int


@subscriber("double", workers=8)
async def double(query: Query) -> int:
    await asyncio.sleep(0.001 * (query.number % 5))
    return 2 * query.number


async def test_a_thousand_requests_in_flight_none_mixed_up(broker: RabbitBroker) -> None:
    async with App(double, brokers={"default": broker}).running() as app:
        asked = (app.request("double", Query(number), int, timeout=50) for number in range(1000))
        assert await asyncio.gather(*asked) == [2 * number for number in range(1000)]


async def test_three_apps_ask_one_service(broker: RabbitBroker) -> None:
    async with (
        App(double, name="service", brokers={"default": broker}).running(),
        App(name="one", brokers={"default": broker}).running() as one,
        App(name="two", brokers={"default": broker}).running() as two,
    ):
        calls = [(app, n) for n in range(50) for app in (one, two)]
        answers = await asyncio.gather(*(app.request("double", Query(n), int, timeout=20) for app, n in calls))
    assert answers == [2 * n for _, n in calls]


async def test_a_late_answer_is_counted_and_goes_to_nobody(broker: RabbitBroker) -> None:
    go = asyncio.Event()

    @subscriber("slow")
    async def slow(query: Query) -> int:
        await go.wait()
        return 1

    async with App(slow, brokers={"default": broker}).running() as app:
        with pytest.raises(ReplyTimeout, match=r"'slow' was not answered within 0\.05 s"):
            await app.request("slow", Query(1), int, timeout=0.05)
        go.set()
        (inbox,) = app.inboxes
        await eventually(lambda: inbox.late == 1)
        assert await app.request("slow", Query(2), int, timeout=20) == 1


async def test_nothing_is_a_reply_too_and_an_outcome_is_none(broker: RabbitBroker) -> None:
    attempts: list[int] = []

    @subscriber("find")
    async def find(query: Query) -> int | Retry | None:
        attempts.append(query.number)
        return Retry(after=0.01) if query.number == 2 and attempts.count(2) == 1 else None

    async with App(find, brokers={"default": broker}).running() as app:
        assert await app.request("find", Query(1), int | None, timeout=20) is None  # type: ignore[arg-type]
        assert await app.request("find", Query(2), int | None, timeout=20) is None  # type: ignore[arg-type]
    assert attempts == [1, 2, 2]


async def test_a_request_that_waited_on_the_server_is_answered(broker: RabbitBroker) -> None:
    """A pause takes it through the retry queues; its reply address is good all the same."""
    attempts: list[int] = []

    @subscriber("find")
    async def find(query: Query) -> int | Retry:
        attempts.append(query.number)
        return Retry(after=1.0) if len(attempts) == 1 else 7

    async with App(find, brokers={"default": broker}).running() as app:
        assert await app.request("find", Query(1), int, timeout=20) == 7
    assert attempts == [1, 1]


async def test_a_request_that_nobody_takes(broker: RabbitBroker) -> None:
    async with App(double, brokers={"default": broker}).running() as app:
        with pytest.raises(Unroutable):
            await app.request(new_name("nobody"), Query(1), int, timeout=20)
        assert await app.request("double", Query(1), int, timeout=20) == 2


async def test_a_lost_connection_fails_what_waits_and_the_next_request_works(
    broker: RabbitBroker, rabbit: Rabbit
) -> None:
    go = asyncio.Event()

    @subscriber("slow", workers=10)
    async def slow(query: Query) -> int:
        if query.number == 1:
            await go.wait()
        return query.number

    async with App(slow, brokers={"default": broker}).running() as app:
        waiting = [asyncio.ensure_future(app.request("slow", Query(1), int, timeout=60)) for _ in range(3)]
        await eventually(lambda: app.inboxes and app.inboxes[0].waiting == 3)
        connection = app.connection()
        assert isinstance(connection, RabbitConnection)
        await eventually(lambda: not connection.publishing.calls)
        await asyncio.to_thread(rabbit.close_connections)
        for one in waiting:
            with pytest.raises(BrokerUnavailable, match="lost before a reply came"):
                await one
        go.set()
        assert app.inboxes[0].waiting == 0

        async def answered() -> bool:
            try:
                return await app.request("slow", Query(5), int, timeout=20) == 5
            except BrokerUnavailable:
                return False

        await eventually(answered, 20)
        await eventually(lambda: app.health().ok)


async def test_the_app_ends_while_a_request_waits(broker: RabbitBroker) -> None:
    begun = asyncio.Event()

    @subscriber("never")
    async def never(query: Query) -> int:
        begun.set()
        await asyncio.Event().wait()
        return 1

    app = App(never, brokers={"default": broker}, drain_timeout=0.1)
    async with app.running():
        asked = asyncio.ensure_future(app.request("never", Query(1), int, timeout=60))
        await begun.wait()
        connection = app.connection()
        assert isinstance(connection, RabbitConnection)
        await eventually(lambda: not connection.publishing.calls)
    with pytest.raises(NotRunning, match="the app ended before the reply came"):
        await asked


async def test_other_programs_ask_and_answer(broker: RabbitBroker, rabbit: Rabbit) -> None:
    """As any client of RabbitMQ does: with the pseudo-queue, and with correlation ids."""
    async with App(double, brokers={"default": broker}).running() as app, raw(rabbit) as other:
        channel = await other.channel()
        got: list[Any] = []

        async def reply(message: Any) -> None:
            got.append((message.body, message.header.properties.correlation_id))

        await channel.basic_consume("amq.rabbitmq.reply-to", reply, no_ack=True)
        asking = commands.Basic.Properties(reply_to="amq.rabbitmq.reply-to", correlation_id="c-1")
        await channel.basic_publish(b'{"number":21}', exchange="double", routing_key="", properties=asking)
        await eventually(lambda: got)
        assert got == [(b"42", "c-1")]

        queue = await other.declare(new_name("theirs"))
        asked = asyncio.ensure_future(app.request(queue, Query(5), int, timeout=20))
        request = await eventually(lambda: other.get(queue))
        assert request is not None
        properties = request.header.properties
        assert (properties.reply_to or "").startswith("amq.rabbitmq.reply-to.")
        answer = commands.Basic.Properties(correlation_id=properties.correlation_id)
        await channel.basic_publish(b"10", exchange="", routing_key=properties.reply_to or "", properties=answer)
        assert await asked == 10


async def test_a_reply_to_somebody_who_is_gone_is_dropped(broker: RabbitBroker, rabbit: Rabbit) -> None:
    addresses: list[str] = []

    @subscriber("note")
    async def note(query: Query, message: Message) -> int:
        addresses.append(message.reply_to or "")
        return 1

    async with App(double, note, brokers={"default": broker}).running() as app:
        async with App(name="asker", brokers={"default": broker}).running() as asker:
            assert await asker.request("note", Query(1), int, timeout=20) == 1
        gone = Outgoing(name=addresses[0], body=b"1", message_id=new_message_id())
        assert not any(await app.connection().publish([gone])), "nobody can tell"
        await app.publish("double", Query(1), reply_to=addresses[0], correlation_id="c")
        assert await app.request("double", Query(2), int, timeout=20) == 4
        assert app.health().ok


@pytest.mark.parametrize(
    "forged",
    [
        "amq.rabbitmq.reply-to.",
        "amq.rabbitmq.reply-to.x",
        "amq.rabbitmq.reply-to.g1h2AA9yZXBseUAxMjMyOTMzMDAAAAz9AAAAAGsNTVY=.+MSRVppgRhaOkDBccrR+Zg==",
        "amq.rabbitmq.reply-to.%s" % ("x" * 100),
        "payments",
    ],
)
async def test_a_forged_reply_address_harms_nobody(broker: RabbitBroker, forged: str) -> None:
    """Some of them end the connection that publishes to them (541). Nothing else is under way on that."""
    async with App(double, brokers={"default": broker}).running() as app:
        connection = app.connection()
        assert isinstance(connection, RabbitConnection)
        assert await app.request("double", Query(1), int, timeout=20) == 2
        before = connection.publisher.connects
        asked = [asyncio.ensure_future(app.request("double", Query(n), int, timeout=20)) for n in range(50)]
        for _ in range(3):
            await app.publish("double", Query(1), reply_to=forged, correlation_id="c")
        assert await asyncio.gather(*asked) == [2 * n for n in range(50)]
        pump = app.pumps[0]
        await eventually(lambda: pump.counters.acked >= 54, 20)
        assert pump.counters.retried == 0, "a reply that nobody can get is no failure"
        assert connection.publisher.connects == before
        assert app.health().ok


def test_handlers_reply_to_direct_addresses_by_default() -> None:
    assert RabbitBroker.reply_patterns == ("amq.rabbitmq.reply-to.*",)
