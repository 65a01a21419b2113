"""What reaches a queue by its bindings: on the server, and in memory, where `TestApp` follows what they say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from streamfw import App, Drop, subscriber
from streamfw.errors import Unroutable
from streamfw.testing import TestApp
from streamfw_rabbit import Exchange, MemoryOffsets, RabbitBroker, RabbitQueue, Stream
from tests.services.rabbit import Rabbit

TOPIC = Exchange("topics", "topic")
DIRECT = Exchange("directs", "direct")
FANOUT = Exchange("fanouts", "fanout")
HEADERS = Exchange("tables", "headers")
# RabbitMQ 4.3 takes two of "#" in one at most.
PATTERNS = (
    "", "#", "*", "user", "user.*", "user.#", "#.created", "*.created", "user.*.created", "user.#.created", "#.#",
    "*.#", "#.*", "*.*", "user.", ".", ".#", "#.", "user.created.#", "#.user.#.created", "us*r", "topics", "*.#.*",
)  # fmt: skip
KEYS = (
    None, "user", "user.created", "user.big.created", "user.a.b.created", "created", "user.", ".user", ".", "..",
    "users.created", "user.created.user.created", "us*r", "*", "#", "user.#", "zoë.created", "topics", "k" * 255,
    "k" * 256,
)  # fmt: skip
TABLES: tuple[Mapping[str, Any], ...] = (
    {}, {"x-match": "any"}, {"a": "1"}, {"a": "1", "b": "2"}, {"x-match": "any", "a": "1", "b": "2"},
    {"x-match": "all", "a": None}, {"a": 1}, {"x-match": "any", "x-a": "1"}, {"x-a": "1"}, {"a": "1", "x-a": "1"},
    {"x-match": "all-with-x", "a": "1", "x-a": "1"}, {"x-match": "any-with-x", "b": "2", "x-a": "1"},
    {"content-type": "application/json"}, {"x-match": "any", "correlation-id": "c", "reply-to": "r"}, {"a": "é"},
)  # fmt: skip
GIVEN: tuple[Mapping[str, str], ...] = (
    {}, {"a": "1"}, {"a": "2"}, {"b": "2"}, {"a": "1", "b": "2"}, {"x-a": "1"}, {"a": "1", "x-a": "1"}, {"a": ""},
    {"A": "1"}, {"a": "é"}, {"b": "2", "c": "3"},
)  # fmt: skip


def bound() -> list[tuple[object, str]]:
    """Sources of all kinds, and their groups."""
    queues: list[object] = [RabbitQueue(f"t{n}", exchange=TOPIC, bind=one) for n, one in enumerate(PATTERNS)]
    queues += [RabbitQueue(f"h{n}", bind=[(HEADERS, "", one)]) for n, one in enumerate(TABLES)]
    queues += [
        RabbitQueue("direct", exchange=DIRECT, bind=["a", "b.*", "directs"]),
        RabbitQueue("fanout", exchange=FANOUT),
        RabbitQueue("fanout-too", exchange=FANOUT, bind="only this"),
        RabbitQueue("several", bind=[(TOPIC, "user.*"), (TOPIC, "#.created"), (FANOUT, ""), (DIRECT, "a")]),
        RabbitQueue("servers-own", bind=[("amq.direct", "a"), ("amq.topic", "a.#")]),
        RabbitQueue("alone"),
        RabbitQueue("fanouts"),  # an exchange has this name
        RabbitQueue("orders"),  # and that of a plain name
        RabbitQueue("with-plain", exchange=Exchange("orders", "fanout", declare="off")),
        Stream("log", exchange=TOPIC, bind="user.*", store=MemoryOffsets()),
    ]
    return [("orders", "one"), ("orders", "two"), *((queue, "shop") for queue in queues)]


async def got(app: App, live: bool) -> Counter[tuple[str, str]]:
    """Who got what, how often: subscribers with their group, and messages."""
    found: Counter[tuple[str, str]] = Counter()
    messages: list[tuple[str, Mapping[str, Any]]] = [("topics", {"key": key}) for key in KEYS]
    messages += [("tables", {"headers": headers}) for headers in GIVEN]
    messages += [("tables", {"correlation_id": "c", "reply_to": "r"}), ("tables", {"key": "a"})]
    messages += [("directs", {"key": key}) for key in (None, "a", "b.*", "b.c", "A")]
    messages += [("fanouts", {}), ("fanouts", {"key": "x"}), ("orders", {}), ("orders", {"key": "k"})]
    messages += [("alone", {}), ("alone", {"key": "k"}), ("several", {}), ("log", {}), ("t1", {"key": "user.x"})]
    messages += [("amq.direct", {"key": "a"}), ("amq.direct", {"key": "a.b"}), ("amq.topic", {"key": "a.b"})]
    async with TestApp(app, live=live, timeout=60) as tb:
        for number, (name, options) in enumerate(messages):
            with suppress(Unroutable):
                await tb.publish(name, f"{number}: {name} {options}", **options)
        await tb.settle()
        for source, group in bound():
            name = source if isinstance(source, str) else str(getattr(source, "name", ""))
            for one in tb.received(f"take_{group}_{name}", str):
                found[f"{group} {name}", one.value] += 1
                assert one.message.name == name
    return found


def taking(source: object, group: str) -> Any:
    async def take(body: str) -> None: ...

    take.__name__ = f"take_{group}_{source if isinstance(source, str) else getattr(source, 'name', '')}"
    return subscriber(source, group=group)(take)


async def test_memory_gives_to_whom_the_server_gives(rabbit: Rabbit) -> None:
    app = App(*(taking(*one) for one in bound()), brokers={"default": RabbitBroker(rabbit.url)}, name="shop")
    in_memory, on_the_server = await got(app, live=False), await got(app, live=True)
    assert len(on_the_server) > 150
    assert in_memory == on_the_server
    assert set(on_the_server.values()) == {1}, "by several bindings a message comes once"


@subscriber(RabbitQueue("mail", exchange=Exchange("events", "topic"), bind="user.*"), attempts=1)
async def mail(body: str) -> None:
    if body == "bad":
        raise ValueError(body)


@subscriber(RabbitQueue("morgue", exchange=Exchange("mail.dead", "fanout")))
async def mourn(body: str) -> None: ...


@subscriber(RabbitQueue("first", exchange=Exchange("letters", "direct"), bind="a"), publishes="events")
async def forward(body: str) -> str | Drop:
    return body


async def test_what_follows_in_memory_goes_by_bindings_too() -> None:
    async with TestApp(App(mail, mourn, forward, brokers={"default": "amqp://nowhere"})) as tb:
        await tb.publish("events", "hello", key="user.created")
        await tb.publish("events", "bad", key="user.gone", delay=5)
        await tb.publish("events", "unheard", key="shop.opened")
        await tb.publish("letters", "without a key", key="a")
        await tb.settle()
        [one] = tb.assert_acked(mail, times=1)
        assert (one.message.name, one.message.key) == ("mail", "user.created")
        with tb.expect(ValueError):
            await tb.advance(5)
        tb.assert_dead_lettered(mail, times=1)
        assert [one.value for one in tb.received(mourn)] == ["bad"]
        assert [one.value for one in tb.published("events")] == ["hello", "bad", "unheard", "without a key"]


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (Exchange("e", "x-consistent-hash"), "Exchange('e', 'x-consistent-hash'): only the server knows how it routes"),
        (Exchange("e", "x-delayed-message", arguments={"x-delayed-type": "x-random"}), "only the server knows"),
    ],
)
async def test_an_exchange_that_only_the_server_knows_is_refused_in_memory(exchange: Exchange, said: str) -> None:
    app = App(taking(RabbitQueue("q", exchange=exchange, bind="1"), "shop"), brokers={"default": "amqp://nowhere"})
    with pytest.raises(ExceptionGroup, match=re.escape(said)):
        async with TestApp(app):
            pass


async def test_types_of_plugins_whose_rules_are_known() -> None:
    delayed = Exchange("later", "x-delayed-message", arguments={"x-delayed-type": "topic"})
    recent = Exchange("recent", "x-recent-history")
    hidden = Exchange("hidden", "fanout", internal=True)
    queue = RabbitQueue("q", bind=[(delayed, "a.*"), (recent, ""), (hidden, "")])
    async with TestApp(App(taking(queue, "shop"), brokers={"default": "amqp://nowhere"})) as tb:
        for name, key in (("later", "a.b"), ("later", "b.b"), ("recent", None), ("hidden", None)):
            await tb.publish(name, f"{name} {key}", key=key)
        await tb.settle()
        assert [one.value for one in tb.received("take_shop_q")] == ["later a.b", "recent None"]
