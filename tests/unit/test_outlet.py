"""Publish middleware, and what an outlet refuses before the broker sees it."""

from __future__ import annotations

import msgspec
import pytest

from streamfw import App, Message, NextPublish, NotRunning, Outgoing, Publisher, Rejected, subscriber
from streamfw.memory import MemoryBroker
from streamfw.testing.synthetic import PositionalBroker
from tests.helpers import eventually


async def test_publish_middleware_is_around_every_publish_the_first_outermost() -> None:
    seen: list[str] = []
    got: list[Message] = []

    async def outer(message: Outgoing, call_next: NextPublish) -> None:
        seen.append(f"outer {message.name}")
        message.headers = message.headers.merged({"tenant": "acme"})
        await call_next(message)
        seen.append(f"accepted {message.name}")

    def inner(message: Outgoing, call_next: NextPublish) -> object:  # a plain function will do
        seen.append(f"inner {message.headers['tenant']}")
        return call_next(message)

    @subscriber("a", publishes="b")
    async def first(number: int) -> int:
        return number + 1

    @subscriber("b")
    async def second(message: Message) -> None:
        got.append(message)

    receipts = Publisher[int]("c")
    app = App(
        first,
        second,
        brokers={"default": MemoryBroker()},
        publishers=[receipts],
        publish_middleware=[outer, inner],  # type: ignore[list-item]
    )
    async with app.running():
        await app.publish("a", 1)
        await eventually(lambda: got)
        await receipts.publish(3)
    assert got[0].body == b"2"
    assert got[0].headers["tenant"] == "acme"
    assert seen == [
        *("outer a", "inner acme", "accepted a"),
        *("outer b", "inner acme", "accepted b"),
        *("outer c", "inner acme", "accepted c"),
    ]


async def test_a_publish_middleware_may_refuse() -> None:
    async def closed(message: Outgoing, call_next: NextPublish) -> None:
        raise Rejected("the shop is closed", name=message.name, message_id=message.message_id)

    async with App(brokers={"default": MemoryBroker()}, publish_middleware=[closed]).running() as app:
        with pytest.raises(Rejected, match="the shop is closed"):
            await app.publish("a", 1)


def test_what_is_no_publish_middleware_is_told_at_build() -> None:
    async def wrong(message: Outgoing) -> None: ...

    with pytest.raises(ExceptionGroup, match="publish_middleware"):
        App(brokers={"default": MemoryBroker()}, publish_middleware=[wrong]).build()  # type: ignore[list-item]


async def test_the_option_that_gives_priorities_is_named() -> None:
    broker = MemoryBroker()
    broker.capabilities = msgspec.structs.replace(broker.capabilities, priorities=False, priorities_option="levels")
    async with App(brokers={"mq": broker}).running() as app:
        with pytest.raises(Rejected, match=r"'mq' has no priorities; its option levels= \(brokers\.mq\.levels\) gives"):
            await app.publish("a", 1, priority=1, broker="mq")
    broker.capabilities = msgspec.structs.replace(broker.capabilities, priorities=True)
    async with App(brokers={"mq": broker}).running() as app:
        await app.publish("a", 1, priority=1, broker="mq")


async def test_a_priority_that_the_broker_has_not_is_refused() -> None:
    async with App(brokers={"default": PositionalBroker()}).running() as app:
        with pytest.raises(Rejected, match="no priorities"):
            await app.publish("a", 1, priority=1)
        await app.publish("a", 1, priority=0)


async def test_an_unbound_or_idle_publisher_says_so() -> None:
    loose = Publisher[int]("a")
    with pytest.raises(NotRunning, match="belongs to no app"):
        await loose.publish(1)
    app = App(brokers={"default": MemoryBroker()}, publishers=[loose])
    app.build()
    with pytest.raises(NotRunning, match="not connected"):
        await loose.publish(1)
    with pytest.raises(NotRunning, match="not connected"):
        await app.publish("a", 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"delay": -1}, ValueError), ({"delay": "soon"}, ValueError), ({"headers": {"a": 1}}, TypeError)],
)
async def test_malformed_options(options: dict[str, object], error: type[Exception]) -> None:
    async with App(brokers={"default": MemoryBroker()}).running() as app:
        with pytest.raises(error):
            await app.publish("a", 1, **options)  # type: ignore[arg-type]
