"""Requests and replies, on memory and on Postgres: none mixed up, late ones counted, foreign addresses refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from streamfw import (
    App,
    Broker,
    DecodeError,
    Message,
    NotRunning,
    Outgoing,
    Publisher,
    ReplyTimeout,
    Retry,
    Unroutable,
    Unsupported,
    subscriber,
)
from streamfw.broker import REPLY_PREFIX
from streamfw.memory import MemoryBroker
from streamfw.message import new_message_id
from streamfw.testing.synthetic import PositionalBroker
from streamfw_postgres import PostgresBroker
from tests.helpers import eventually
from tests.services.postgres import Postgres


class Query(msgspec.Struct):
    number: int


@pytest.fixture(params=["memory", "postgres"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "memory":
        yield MemoryBroker()
    else:
        database: Postgres = request.getfixturevalue("database")
        yield PostgresBroker(database.dsn, auto_migrate=True, poll=0.2)


@subscriber("double", workers=8)
async def double(query: Query) -> int:
    await asyncio.sleep(0.001 * (query.number % 5))
    return 2 * query.number


async def test_a_thousand_requests_in_flight_none_mixed_up(broker: Broker) -> None:
    async with App(double, brokers={"default": broker}).running() as app:
        asked = (app.request("double", Query(number), int, timeout=50) for number in range(1000))
        assert await asyncio.gather(*asked) == [2 * number for number in range(1000)]


async def test_two_apps_ask_the_same_service(broker: Broker) -> None:
    asker = Publisher[Query]("double")
    async with (
        App(double, name="service", brokers={"default": broker}).running(),
        App(name="asker", brokers={"default": broker}, publishers=[asker]).running(),
        App(name="another", brokers={"default": broker}).running() as another,
    ):
        answers = await asyncio.gather(
            *(asker.request(Query(n), int, timeout=20) for n in range(50)),
            *(another.request("double", Query(n), int, timeout=20) for n in range(100, 150)),
        )
    assert answers == [2 * n for n in (*range(50), *range(100, 150))]


async def test_an_answer_after_the_deadline_is_counted_and_not_delivered(broker: Broker) -> None:
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
        assert inbox.waiting == 0
        assert await app.request("slow", Query(2), int, timeout=20) == 1


async def test_nothing_is_a_reply_too_and_an_outcome_is_none(broker: Broker) -> None:
    attempts: list[int] = []

    @subscriber("find")
    async def find(query: Query, message: Message) -> int | Retry | None:
        attempts.append(message.attempt)
        return Retry(after=0.01) if query.number == 2 and message.attempt == 1 else None

    async with App(find, brokers={"default": broker}).running() as app:
        assert await app.request("find", Query(1), int | None, timeout=20) is None  # type: ignore[arg-type]
        assert await app.request("find", Query(2), int | None, timeout=20) is None  # type: ignore[arg-type]
    assert attempts == [1, 1, 2]


async def test_a_reply_that_is_something_else(broker: Broker) -> None:
    async with App(double, brokers={"default": broker}).running() as app:
        with pytest.raises(DecodeError, match="the reply to the request to 'double'"):
            await app.request("double", Query(1), str, timeout=20)


async def test_a_reply_goes_only_where_the_handler_allows(broker: Broker) -> None:
    seen: list[bytes] = []

    @subscriber("double", replies_to=["answers.*"])
    async def careful(query: Query) -> int:
        return 2 * query.number

    @subscriber("answers.mine")
    async def mine(message: Message) -> None:
        seen.append(message.body)

    @subscriber("payments")
    async def payments(message: Message) -> None:
        seen.append(b"payment")

    async with App(careful, mine, payments, brokers={"default": broker}).running() as app:
        await app.publish("double", Query(1), reply_to="payments")
        await app.publish("double", Query(2), reply_to="answers.mine", correlation_id="c")
        await eventually(lambda: seen)
        with pytest.raises(ReplyTimeout):  # the broker's own inboxes are not among its patterns
            await app.request("double", Query(3), int, timeout=0.3)
    assert seen == [b"4"]


async def test_an_inbox_leaves_nothing_behind_and_nobody_keeps_what_comes_for_it(broker: Broker) -> None:
    async with App(double, name="service", brokers={"default": broker}).running() as service:
        async with App(name="asker", brokers={"default": broker}).running() as app:
            assert await app.request("double", Query(1), int, timeout=20) == 2
            (inbox,) = app.inboxes
        late = Outgoing(name=inbox.address, body=b"2", message_id=new_message_id(), kept=False)
        (error,) = await service.connection().publish([late])
        assert isinstance(error, Unroutable)
        # A request whose asker is gone is handled, and its reply dropped: it does not come back.
        await service.publish("double", Query(5), reply_to=inbox.address, correlation_id="c", message_id="gone")
        assert await service.request("double", Query(2), int, timeout=20) == 4
        assert service.health().ok


async def test_kept_and_unkept_messages_in_one_publish(broker: Broker) -> None:
    def message(name: str, kept: bool) -> Outgoing:
        return Outgoing(name=name, body=b"1", message_id=new_message_id(), kept=kept)

    @subscriber("known")
    async def known(message: Message) -> None: ...

    async with App(known, brokers={"default": broker}).running() as app:
        answers = await app.connection().publish(
            [message("known", False), message("nobody", True), message("nobody", False), message("known", True)]
        )
    assert [type(answer) for answer in answers] == [type(None), type(None), Unroutable, type(None)]


async def test_a_group_that_is_withdrawn_is_forgotten_with_its_messages(broker: Broker) -> None:
    async with App(name="a", brokers={"default": broker}).running() as app:
        connection = app.connection()

        @subscriber("letters", group="old")
        async def old(message: Message) -> None: ...

        async with App(old, brokers={"default": broker}).running():
            pass
        for number in range(3):
            await app.publish("letters", number)
        assert await connection.withdraw("letters", "old") == 3
        assert await connection.withdraw("letters", "old") == 0
        await app.publish("letters", 4)
        seen: list[bytes] = []

        @subscriber("letters", group="new")
        async def new(message: Message) -> None:
            seen.append(message.body)

        async with App(new, brokers={"default": broker}).running():
            await eventually(lambda: seen)
    assert seen == [b"4"], "the next group gets what was published since"


async def test_the_app_ends_while_a_request_waits(broker: Broker) -> None:
    @subscriber("never")
    async def never(query: Query) -> int:
        await asyncio.Event().wait()
        return 1

    app = App(never, brokers={"default": broker}, drain_timeout=0.1)
    async with app.running():
        asked = asyncio.ensure_future(app.request("never", Query(1), int, timeout=60))
        await eventually(lambda: app.inboxes and app.inboxes[0].waiting)
    with pytest.raises(NotRunning, match="the app ended before the reply came"):
        await asked


async def test_a_broker_without_replies_says_so() -> None:
    async with App(brokers={"default": PositionalBroker()}).running() as app:
        with pytest.raises(Unsupported, match="no replies"):
            await app.request("double", Query(1), int)


def test_the_address_of_an_inbox_is_what_handlers_reply_to_by_default() -> None:
    assert Broker.reply_patterns == (f"{REPLY_PREFIX}*",)
