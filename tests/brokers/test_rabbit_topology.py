"""What is declared, looked for or left alone on a RabbitMQ server, and how refusals are told."""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from streamfw import App, subscriber
from streamfw.broker import Subscription
from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable
from streamfw_rabbit import (
    Exchange,
    MemoryOffsets,
    RabbitBroker,
    RabbitQueue,
    Stream,
    TopologyMismatch,
    stream_readership,
)
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.errors import AccessRefused, NotFound, PreconditionFailed
from streamfw_rabbit.stream_reader import survey
from tests.brokers.rabbit_broker_kit import Raw, connected, member, new_name, outgoing, raw, send, version_of
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services._homes import free_port
from tests.services.rabbit import Rabbit


@pytest.fixture
async def connection(rabbit: Rabbit) -> AsyncIterator[RabbitConnection]:
    async with connected(rabbit) as opened:
        yield opened


@pytest.fixture
async def other(rabbit: Rabbit) -> AsyncIterator[Raw]:
    async with raw(rabbit) as opened:
        yield opened


async def refusal(connection: RabbitConnection, source: RabbitQueue, **options: object) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        await connection.open(Subscription(source.name, source=source, **options))  # type: ignore[arg-type]
    assert connection.consuming.current is not None, "it costs no connection"
    return caught.value


# ---------------------------------------------------------------------- mismatches


@pytest.mark.parametrize(
    ("first", "second", "argument"),
    [
        (RabbitQueue("q", max_length=5), RabbitQueue("q", max_length=6), "x-max-length"),
        (RabbitQueue("q"), RabbitQueue("q", type="classic"), "x-queue-type"),
        (RabbitQueue("q"), RabbitQueue("q", single_active=True), "x-single-active-consumer"),
        (RabbitQueue("q", delivery_limit=20), RabbitQueue("q", delivery_limit=30), "x-delivery-limit"),
        (RabbitQueue("q", type="classic"), RabbitQueue("q", type="classic", durable=False), "durable"),
    ],
)
async def test_a_queue_with_other_properties(
    connection: RabbitConnection, first: RabbitQueue, second: RabbitQueue, argument: str
) -> None:
    name = new_name("queue")
    first, second = (replace_name(one, name) for one in (first, second))
    async with member(connection, name, source=first):
        error = await refusal(connection, second)
        assert isinstance(error, TopologyMismatch)
        assert isinstance(error, BrokerRefused)
        assert (error.queue, error.argument) == (name, argument)
        assert error.declared != error.actual
        assert "declare='passive' (or 'off')" in str(error)
        async with member(connection, name, source=replace_name(second, name, declare="off")):
            pass


def replace_name(source: RabbitQueue, name: str, **changes: object) -> RabbitQueue:
    import msgspec

    return msgspec.structs.replace(source, name=name, **changes)


async def test_a_dead_letter_that_changes_its_name_is_a_mismatch(connection: RabbitConnection) -> None:
    name = new_name()
    async with member(connection, name, dead_letter=f"{name}.dead"):
        pass
    with pytest.raises(TopologyMismatch) as caught:
        await connection.open(Subscription(name, "shop", dead_letter=f"{name}.elsewhere"))
    assert caught.value.argument == "x-dead-letter-exchange"
    assert (f"{name}.elsewhere" in caught.value.declared, f"{name}.dead" in caught.value.actual) == (True, True)


async def test_an_exchange_of_another_type(connection: RabbitConnection, other: Raw) -> None:
    name = new_name("events")
    channel = await other.channel()
    await channel.exchange_declare(name, exchange_type="direct", durable=True)
    error = await refusal(connection, RabbitQueue(new_name(), exchange=Exchange(name, "topic"), bind="#"))
    assert isinstance(error, TopologyMismatch)
    assert (error.queue, error.argument) == (name, "type")
    with pytest.raises(TopologyMismatch, match=f"exchange '{name}' exists with other properties: type is 'direct'"):
        await connection.open(Subscription(name))


async def test_a_type_of_exchange_that_the_server_does_not_know(connection: RabbitConnection) -> None:
    exchange = Exchange(new_name("delayed"), "x-delayed-message", arguments={"x-delayed-type": "topic"})
    error = await refusal(connection, RabbitQueue(new_name(), exchange=exchange, bind="#"))
    assert isinstance(error, BrokerRefused)
    assert "unknown exchange type" in str(error)
    assert "plugin" in str(error)


async def test_what_the_server_permits_no_more(connection: RabbitConnection) -> None:
    """It ends the whole connection (541): one that nobody else uses."""
    source = RabbitQueue(new_name("old"), type="classic", arguments={"x-queue-master-locator": "min-masters"})
    if version_of(connection) < (4, 3):
        async with member(connection, source.name, source=source):
            return
    error = await refusal(connection, source)
    assert isinstance(error, PreconditionFailed)
    assert f"declaring queue '{source.name}'" in str(error)
    assert "Feature `queue_master_locator` is deprecated" in str(error)


async def test_what_the_server_is_too_old_for(connection: RabbitConnection) -> None:
    server = version_of(connection)
    if server >= (3, 12):
        async with member(connection, "new", source=RabbitQueue("new", arguments={"x-consumer-timeout": 60_000})):
            return
    error = await refusal(connection, RabbitQueue("old", arguments={"x-consumer-timeout": 60_000}))
    version = ".".join(map(str, server))
    assert f"x-consumer-timeout needs RabbitMQ 3.12 or later; the server is {version}" in str(error)


# ---------------------------------------------------------------------- passive and off


async def test_passive_only_looks(connection: RabbitConnection, other: Raw) -> None:
    missing = RabbitQueue(new_name("missing"), declare="passive")
    error = await refusal(connection, missing)
    assert isinstance(error, NotFound)
    assert missing.name in str(error)
    assert not await other.exists(missing.name)
    there = RabbitQueue(await other.declare(new_name("there"), max_length=7), declare="passive")
    async with member(connection, there.name, source=there) as taker:
        assert await send(connection, outgoing(there.name)) == [None]
        await taker.acknowledge(await taker.take(1))
    lost = await refusal(connection, there, dead_letter=(dead := new_name("dead")))
    assert isinstance(lost, NotFound), "a dead letter that is not there would keep its messages back"
    assert f"looking for '{dead}', which is no exchange, nor a queue" in str(lost)
    await other.declare(dead)
    async with member(connection, there.name, source=there, dead_letter=dead):
        pass
    nowhere = Exchange(new_name("nowhere"))
    lost = await refusal(connection, replace_name(there, there.name, exchange=nowhere, bind="#"))
    assert isinstance(lost, NotFound)
    assert f"no exchange '{nowhere.name}'" in str(lost)


async def test_a_queue_that_is_there_with_other_properties_leaves_nothing_behind(
    connection: RabbitConnection, other: Raw
) -> None:
    name = await other.declare(new_name("there"), dead_letter_exchange="old.dlx", delivery_limit=20)
    exchange, dead = Exchange(new_name("events")), new_name("dead")
    source = RabbitQueue(name, exchange=exchange, bind="#", dead_letter_strategy="at-most-once")
    error = await refusal(connection, source, dead_letter=dead)
    assert isinstance(error, TopologyMismatch)
    assert "It is what dead_letter= of the subscriber says; or declare nothing" in str(error)
    assert "declare='passive'" in str(error)
    assert not await other.exists(dead)
    for missing in (exchange.name, dead):
        error = await refusal(connection, RabbitQueue(name, declare="passive", exchange=Exchange(missing), bind="#"))
        assert isinstance(error, NotFound)


@pytest.mark.parametrize("name", ["payment.timeout", "rate-limit", "is down", "exclusive use"])
async def test_a_queue_whose_name_sounds_like_an_excuse(connection: RabbitConnection, name: str) -> None:
    error = await refusal(connection, RabbitQueue(name, declare="passive"))
    assert isinstance(error, NotFound)


async def test_off_says_nothing_until_it_consumes(connection: RabbitConnection, other: Raw) -> None:
    error = await refusal(connection, RabbitQueue(new_name("missing"), declare="off"))
    assert isinstance(error, NotFound)
    assert "consuming from" in str(error)
    there = RabbitQueue(await other.declare(new_name("there")), declare="off")
    async with member(connection, there.name, source=there) as taker:
        assert await send(connection, outgoing(there.name)) == [None]
        await taker.acknowledge(await taker.take(1))


async def test_a_broker_that_declares_nothing(rabbit: Rabbit, other: Raw) -> None:
    name = new_name()
    async with connected(rabbit, declare="passive") as careful:
        with pytest.raises(NotFound, match=f"{name}.shop"):
            await careful.open(Subscription(name, "shop"))
        async with connected(rabbit) as maker, member(maker, name, dead_letter=f"{name}.dead"):
            pass
        async with member(careful, name, dead_letter=f"{name}.dead") as taker:
            assert await send(careful, outgoing(name), outgoing(f"{name}.dead")) == [None, None]
            await taker.acknowledge(await taker.take(1))


async def test_an_exchange_may_be_the_business_of_others(connection: RabbitConnection, other: Raw) -> None:
    """The queue is declared and bound, and what it is bound to is not."""
    source = RabbitQueue(new_name("queue"), bind=[("amq.topic", "orders.*"), ("amq.direct", "exact")])
    async with member(connection, source.name, source=source) as taker:
        await other.publish("amq.topic", "orders.created", b"1")
        await other.publish("amq.direct", "exact", b"2")
        taken = await taker.take(2)
        assert {delivery.body for delivery in taken} == {b"1", b"2"}
        await taker.acknowledge(taken)
    nowhere = RabbitQueue(new_name("queue"), exchange=new_name("nowhere"), bind="#")
    error = await refusal(connection, nowhere)
    assert isinstance(error, NotFound)
    error = await refusal(
        connection, replace_name(nowhere, nowhere.name, exchange=Exchange("no.such", declare="passive"))
    )
    assert "no exchange 'no.such'" in str(error)


async def test_bindings_by_headers(connection: RabbitConnection, other: Raw) -> None:
    exchange = Exchange(new_name("headers"), "headers")
    match = {"x-match": "all", "tenant": "acme"}
    source = RabbitQueue(new_name("queue"), bind=[(exchange, "", match)])
    async with member(connection, source.name, source=source) as taker:
        answers = await send(
            connection,
            outgoing(exchange.name, b"1", headers={"tenant": "acme"}),
            outgoing(exchange.name, b"2", headers={"tenant": "other"}),
        )
        assert [kind.__name__ if kind else None for kind in answers] == [None, "Unroutable"]
        await taker.acknowledge(await taker.take(1))


# ---------------------------------------------------------------------- who is quicker


@pytest.mark.parametrize("place", ["streamfw_rabbit.topology._declare_name", "streamfw_rabbit.source.declare"])
async def test_a_queue_that_is_deleted_while_it_is_declared_is_declared_again(
    rabbit: Rabbit, other: Raw, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Between its declaration and its binding, or its consumer: that is no mistake of the app, and passes."""
    module, _, name = place.rpartition(".")
    declaring = getattr(importlib.import_module(module), name)
    deleted = 0

    async def and_deleted(*arguments: object) -> None:
        nonlocal deleted
        await declaring(*arguments)
        deleted += 1
        if deleted == 2:  # the first time is that of the start
            await other.delete("orders.shop")

    monkeypatch.setattr(place, and_deleted)
    handled: list[int] = []

    @subscriber("orders", dead_letter=None)
    async def handle(number: int) -> None:
        handled.append(number)

    async with App(handle, name="shop", brokers={"default": RabbitBroker(rabbit.url)}).running() as app:
        await other.delete("orders.shop")
        await eventually(lambda: deleted >= 3)
        await eventually(lambda: app.health().ok)
        await app.publish("orders", 1)
        await eventually(lambda: handled == [1])


async def test_a_stream_that_is_deleted_while_it_is_opened_is_declared_again(
    connection: RabbitConnection, other: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def and_deleted(*arguments: Any) -> Any:
        await other.delete("events")
        monkeypatch.setattr(stream_readership, "survey", survey)
        return await survey(*arguments)

    monkeypatch.setattr(stream_readership, "survey", and_deleted)
    subscription = Subscription("events", "shop", source=Stream("events", offset="next", store=MemoryOffsets()))
    with pytest.raises(BrokerUnavailable, match="it was deleted after it was declared"):
        await connection.open(subscription)
    source = await connection.open(subscription)
    await eventually(lambda: source.health().ok)


# ---------------------------------------------------------------------- who may


async def test_wrong_credentials_end_the_app_at_once(rabbit: Rabbit, transport: TransportName) -> None:
    for wrong in (replace(rabbit, password="no"), replace(rabbit, user="nobody"), replace(rabbit, vhost="nowhere")):
        broker = RabbitBroker(wrong.url, transport=transport)
        async with asyncio.timeout(10):
            with pytest.raises(AccessRefused) as caught:
                async with App(brokers={"default": broker}).running():
                    pytest.fail("it ran")
        assert wrong.password not in str(caught.value)


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ({"configure": ""}, "access to queue 'orders.shop'"),
        ({"read": "^(?!orders.shop$).*"}, "access to queue 'orders.shop'"),
    ],
)
async def test_a_permission_that_is_refused_ends_the_app_at_once(
    rabbit: Rabbit, transport: TransportName, rights: dict[str, str], said: str
) -> None:
    rabbit.permit(**rights)

    @subscriber("orders", dead_letter=None)
    async def handle(number: int) -> None: ...

    broker = RabbitBroker(rabbit.url, transport=transport)
    async with asyncio.timeout(10):
        with pytest.raises(AccessRefused, match=said):
            async with App(handle, name="shop", brokers={"default": broker}).running():
                pytest.fail("it ran")


async def test_a_right_that_is_taken_away_while_it_runs(rabbit: Rabbit, transport: TransportName) -> None:
    @subscriber("orders", dead_letter=None)
    async def handle(number: int) -> None: ...

    app = App(handle, name="shop", brokers={"default": RabbitBroker(rabbit.url, transport=transport)})

    async def lives() -> None:
        async with asyncio.timeout(20), app.running():
            rabbit.permit(configure="")
            await asyncio.to_thread(rabbit.close_connections)
            await asyncio.Event().wait()

    with pytest.raises(AccessRefused):
        await lives()


async def test_a_server_that_is_away_is_no_refusal(transport: TransportName) -> None:
    broker = RabbitBroker(f"amqp://127.0.0.1:{free_port()}", transport=transport)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
        async with asyncio.timeout(5), broker.connect():
            pytest.fail("it connected")


async def test_one_of_several_hosts(rabbit: Rabbit, transport: TransportName) -> None:
    both = rabbit.url.replace("@", f"@127.0.0.1:{free_port()},", 1)

    @subscriber("orders")
    async def handle(number: int) -> None: ...

    app = App(handle, brokers={"default": RabbitBroker(both, transport=transport)})
    async with asyncio.timeout(20), app.running():
        await app.publish("orders", 1)
        assert app.health().ok


async def test_over_tls(rabbit: Rabbit, transport: TransportName) -> None:
    assert rabbit.ca is not None
    async with RabbitBroker(rabbit.tls_url, ca=str(rabbit.ca), transport=transport).connect() as connection:
        assert isinstance(connection, RabbitConnection)
        name = new_name()
        async with member(connection, name) as taker:
            assert await send(connection, *(outgoing(name, bytes(50_000)) for _ in range(20))) == [None] * 20
            await taker.acknowledge(await taker.take(20))
    with pytest.raises(BrokerRefused, match="certificate") as caught:
        async with RabbitBroker(rabbit.tls_url, transport=transport).connect():
            pytest.fail("it trusted anybody")
    assert rabbit.password not in str(caught.value)
    assert ssl.OPENSSL_VERSION
