"""Streams of RabbitMQ: where a group begins and goes on, who of it reads, what a cut and a kill leave behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from streamfw import App, Batch, Message, Retry, subscriber
from streamfw.broker import Settlement, Subscription
from streamfw.errors import (
    BrokerClosed,
    BrokerRefused,
    BrokerUnavailable,
    PartitionRevoked,
    StaleDelivery,
    Unsupported,
)
from streamfw.message import ORIGIN_OFFSET
from streamfw.outcome import ACK
from streamfw.testing.conformance import Member
from streamfw_rabbit import (
    Exchange,
    MemoryOffsets,
    Offset,
    PostgresOffsets,
    RabbitBroker,
    ServerOffsets,
    Stream,
    TopologyMismatch,
    stream_readership,
    streams,
)
from streamfw_rabbit.channel import Properties, Receipts
from streamfw_rabbit.errors import AccessRefused, NotFound
from streamfw_rabbit.offsets import Place
from streamfw_rabbit.stream_reader import survey
from streamfw_rabbit.streams import lock_name
from tests.brokers.rabbit_broker_kit import outgoing, raw, send
from tests.brokers.rabbit_streams_kit import (
    NAME,
    Desk,
    app_of,
    desk,
    numbers,
    offsets,
    reader,
    readership_of,
    standing_by,
)
from tests.helpers import eventually
from tests.services.postgres import Postgres
from tests.services.rabbit import Rabbit


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_readership, "STORE_EVERY", 0.03)
    monkeypatch.setattr(stream_readership, "STAND_BY", 0.05)
    monkeypatch.setattr(stream_readership, "LOOK", 0.2)
    monkeypatch.setattr(stream_readership, "DOUBT", 0.3)


@pytest.fixture
async def on(rabbit: Rabbit) -> AsyncIterator[Desk]:
    async with desk(rabbit) as made:
        yield made


# ------------------------------------------------------------------ where a group begins


async def test_a_new_group_begins_at_the_first_message(on: Desk) -> None:
    await on.make()
    await on.fill(5)
    async with reader(on) as one:
        taken = await one.take(5)
        assert [delivery.body for delivery in taken] == numbers(range(5))
        assert offsets(taken) == list(range(5))
        await one.acknowledge(taken)


async def test_next_is_what_comes_and_what_comes_while_the_group_is_away(on: Desk) -> None:
    await on.make()
    await on.fill(5)
    async with reader(on, stream={"offset": "next"}) as one:
        await one.expect_nothing(0.2)
    assert on.stored() == 5, "it is registered from the beginning on"
    await on.fill(3, first=5)
    async with reader(on, stream={"offset": "next"}) as one:
        assert offsets(await one.take(3)) == [5, 6, 7]


async def test_next_of_an_empty_stream(on: Desk) -> None:
    async with reader(on, stream={"offset": "next"}) as one:
        await on.fill(2)
        assert offsets(await one.take(2)) == [0, 1]


async def test_last_is_the_last_chunk(on: Desk) -> None:
    await on.make()
    await on.fill(5)
    await on.fill(1, first=5)
    async with reader(on, stream={"offset": "last"}) as one:
        assert offsets(await one.take(1)) == [5]


@pytest.mark.parametrize(("start", "expected"), [(0, 0), (3, 3), (5, 5), (1000, 5)])
async def test_an_offset_or_the_nearest(on: Desk, start: int, expected: int) -> None:
    await on.make()
    await on.fill(5)
    async with reader(on, stream={"offset": start}) as one:
        await on.fill(1, first=5)
        assert offsets(await one.take(1)) == [expected]


async def next_second() -> datetime:
    """The beginning of the next second, when it has begun: AMQP's times are whole seconds."""
    second = (datetime.now(UTC) + timedelta(seconds=1)).replace(microsecond=0)
    await eventually(lambda: datetime.now(UTC) > second)
    return second


async def test_a_time(on: Desk) -> None:
    await on.make()
    await on.fill(5)
    between = await next_second()
    await on.fill(2, first=5)
    async with reader(on, "at", stream={"offset": between}) as one:
        assert offsets(await one.take(2)) == [5, 6]
    async with reader(on, "before", stream={"offset": between - timedelta(days=1)}) as one:
        assert offsets(await one.take(1)) == [0]
    async with reader(on, "after", stream={"offset": between + timedelta(days=1)}) as one:
        await on.fill(1, first=7)
        assert offsets(await one.take(1)) == [7]


async def test_what_is_stored_counts_more(on: Desk) -> None:
    await on.make()
    await on.fill(10)
    async with reader(on) as one:
        await one.acknowledge(await one.take(4))
    async with reader(on, stream={"offset": "next"}) as one:
        assert offsets(await one.take(6)) == [4, 5, 6, 7, 8, 9]


async def test_groups_have_offsets_of_their_own(on: Desk) -> None:
    await on.make()
    await on.fill(10)
    async with reader(on, "a") as a, reader(on, "b") as b:
        await a.acknowledge(await a.take(10))
        taken = await b.take(3)
        assert offsets(taken) == [0, 1, 2]
        await b.acknowledge(taken)
    assert (on.stored("a"), on.stored("b")) == (10, 3)


# ------------------------------------------------------------------ settling


async def test_settling_in_any_order_stores_the_watermark(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(6)
        taken = await one.take(6)
        for settled, stored in (([5, 1], 0), ([0], 2), ([3], 2), ([2], 4), ([4], 6)):
            await one.acknowledge([taken[place] for place in settled])
            await one.flush()
            assert on.stored() == stored


async def test_the_watermark_is_stored_by_itself(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(3)
        await one.acknowledge(await one.take(3))
        await eventually(lambda: on.stored() == 3)


async def test_a_message_that_is_held_up_repeats_what_is_behind_it_and_nothing_else(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(10)
        taken = await one.take(10)
        await one.acknowledge([*taken[:4], *taken[5:]])
    async with reader(on) as one:
        assert offsets(await one.take(6)) == [4, 5, 6, 7, 8, 9], "within a chunk, from the stored offset on"


async def test_what_a_stream_cannot_do_is_refused(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(1)
        (delivery,) = await one.take(1)
        with pytest.raises(Unsupported, match="cannot settle with"):
            await one.source.settle([Settlement(delivery, Retry(1.0))])
        await one.acknowledge([delivery])
        (error,) = await one.settle([delivery])
        assert type(error) is StaleDelivery


async def test_more_than_the_prefetch_and_chunks_that_are_larger(on: Desk) -> None:
    async with reader(on, stream={"prefetch": 7}) as one:
        for place in range(10):
            await on.fill(100, first=place * 100)
        taken = []
        for _ in range(100):
            some = await one.take(10)
            taken += some
            await one.acknowledge(some)
        assert offsets(taken) == list(range(1000))


async def test_who_is_slow_is_not_flooded(on: Desk) -> None:
    async with reader(on, stream={"prefetch": 10}) as one:
        for place in range(50):
            await on.fill(10, first=place * 10)
        await one.take(10)
        running = readership_of(one).reader
        assert running is not None
        await eventually(lambda: not running.at_the_end)
        assert running.waiting < 250, "the prefetch, and a chunk"


async def test_reading_stops_while_too_much_is_open(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "OPEN_LIMIT", 5)
    async with reader(on) as one:
        await on.fill(20)
        taken = await one.take(5)
        await one.expect_nothing(0.2)
        await one.acknowledge(taken[1:])
        taken += await one.take(4)
        assert offsets(taken) == list(range(9))


async def test_reading_stops_while_a_crash_would_repeat_too_much(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_LIMIT", 10)
    async with reader(on) as one:
        await on.fill(30)
        (held, *others) = await one.take(10)
        await one.acknowledge(others)
        await one.expect_nothing(0.2)
        await one.acknowledge([held])
        assert offsets(await one.take(10)) == list(range(10, 20))


# ------------------------------------------------------------------ a cut


@pytest.mark.parametrize("transport", ["aiormq", "fast"])
async def test_a_cut_takes_nothing_away(rabbit: Rabbit, transport: str) -> None:
    async with desk(rabbit, transport=transport) as on, reader(on) as one:
        await on.fill(10)
        taken = await one.take(6)
        await on.cut()
        await one.acknowledge(taken[:3])
        taken += await one.take(4)
        assert offsets(taken) == list(range(10)), "from where it was, and nothing twice"
        await one.acknowledge(taken[3:])
        await one.flush()
        assert on.stored() == 10


async def test_an_app_that_is_cut_again_and_again_handles_each_once(rabbit: Rabbit) -> None:
    seen: list[int] = []

    @subscriber(Stream(NAME, store=MemoryOffsets()), workers=4)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.0005)
        seen.append(number)

    async with desk(rabbit) as on, app_of(rabbit, handle).running() as app:
        for place in range(5):
            for part in range(4):
                await publish(on, 100, place * 400 + part * 100)
            await eventually(lambda: len(seen) > place * 300)  # noqa: B023 - awaited at once
            connects = on.connection.publisher.connects
            await on.cut()
            # What goes out on the old connection meanwhile would end unknown.
            await eventually(lambda: on.connection.publisher.connects > connects)  # noqa: B023 - awaited at once
        await eventually(lambda: len(seen) >= 2000, 20)
        assert sorted(seen) == list(range(2000))
        await eventually(lambda: app.health().ok)


async def publish(on: Desk, count: int, first: int) -> None:
    """Through a cut. Whatever may be stored is published once only."""
    left = [outgoing(NAME, body) for body in numbers(range(first, first + count))]
    while left:
        answers = await on.connection.publish(left)
        assert all(answer is None or type(answer).__name__ == "Unavailable" for answer in answers), answers
        left = [message for message, answer in zip(left, answers or [None] * len(left), strict=True) if answer]


async def test_nothing_begins_between_a_cut_and_the_next_reader(rabbit: Rabbit) -> None:
    """Somebody else may read by then."""
    began: list[int] = []
    go_on = asyncio.Event()

    @subscriber(Stream(NAME, store=MemoryOffsets()), ordered_by="partition")
    async def handle(number: int) -> None:
        began.append(number)
        await go_on.wait()

    async with desk(rabbit) as on, app_of(rabbit, handle).running() as app:
        await on.fill(5)
        await eventually(lambda: began == [0])
        held = app.pumps[0].crew
        await asyncio.to_thread(rabbit.permit, ".*", ".*", "nothing")  # it can connect, and not read
        await on.cut()
        await eventually(lambda: held.shelf is not None)
        go_on.set()
        await eventually(lambda: not app.health().ok)
        await eventually(lambda: not held.running)
        assert began == [0]


# ------------------------------------------------------------------ one reader at a time


async def test_others_stand_by_and_take_over_when_it_closes(rabbit: Rabbit, on: Desk) -> None:
    async with desk(rabbit, on.store) as elsewhere, reader(on) as first, reader(elsewhere) as second:
        await on.fill(10)
        taken = await first.take(10)
        await standing_by(second)
        assert second.source.health().ok
        assert second.source.gauges()["partitions"] == 0
        await first.acknowledge(taken[:4])
        await first.close()
        again = await second.take(6)
        assert offsets(again) == [4, 5, 6, 7, 8, 9]
        await second.acknowledge(again)


async def test_two_of_one_connection(on: Desk) -> None:
    async with reader(on) as first, reader(on) as second:
        await on.fill(4)
        await first.acknowledge(await first.take(4))
        await standing_by(second)
        await first.close()
        await on.fill(1, first=4)
        assert offsets(await second.take(1)) == [4]


async def test_others_take_over_when_its_connection_is_lost(rabbit: Rabbit, on: Desk) -> None:
    async with desk(rabbit, on.store) as elsewhere, reader(on) as first, reader(elsewhere) as second:
        await on.fill(6)
        taken = await first.take(6)
        await first.acknowledge(taken[:2])
        await first.flush()
        await standing_by(second)
        # The first one loses its connection, and gets no other.
        epoch = on.connection.consuming.current
        assert epoch is not None
        on.connection.consuming.options = on.connection.consuming.options.__class__(hosts=(("127.0.0.1", 1),))
        epoch.lost("a test")
        again = await second.take(4)
        assert offsets(again) == [2, 3, 4, 5]
        await second.acknowledge(again)
        await second.flush()
        await eventually(lambda: readership_of(first).reading is None)
        errors = await first.settle(taken[2:])
        assert {type(error) for error in errors} == {PartitionRevoked}
        assert len(errors) == 4
        assert on.stored() == 6


async def test_who_was_ousted_stores_nothing_any_more(rabbit: Rabbit, on: Desk) -> None:
    """It believes to be the reader, and somebody else has taken the bookmark."""
    async with reader(on) as one:
        await on.fill(5)
        taken = await one.take(5)
        thief = on.store.open(Place(rabbit.vhost, NAME, "shop"))
        assert await thief.take() == 0
        assert await thief.store(2)
        await one.acknowledge(taken)
        again = await one.take(3)  # it takes it back, from where that was
        assert offsets(again) == [2, 3, 4]
        (error,) = await one.settle(taken[:1])
        assert type(error) is PartitionRevoked
        assert not await thief.is_ours()


async def test_the_order_holds_over_processes(rabbit: Rabbit) -> None:
    store, seen = MemoryOffsets(), []

    def make() -> App:
        @subscriber(Stream(NAME, store=store), ordered_by="key", workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.001 * (number % 3))
            seen.append(number)

        return app_of(rabbit, handle)

    async with desk(rabbit, store) as on, make().running():
        await on.fill(200, key="a")
        await eventually(lambda: len(seen) > 50)
        async with make().running():
            await on.fill(100, first=200, key="a")
            await eventually(lambda: len(seen) > 250)
    assert seen == list(range(len(seen)))


async def test_a_process_that_is_killed_is_followed_from_what_it_stored(rabbit: Rabbit, database: Postgres) -> None:
    store = PostgresOffsets(database.dsn)
    async with desk(rabbit, store) as on:
        await on.make()
        for place in range(10):
            await on.fill(50, first=place * 50)
        script = Path(__file__).with_name("rabbit_streams_user.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), rabbit.url, database.dsn, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        handled = [int(await asyncio.wait_for(process.stdout.readline(), 20)) for _ in range(120)]
        process.kill()
        handled += [int(line) for line in (await process.stdout.read()).split()]
        await process.wait()
        async with reader(on, "killed") as successor:
            taken = await successor.take(1)
            (begin,) = offsets(taken)
            taken += await successor.take(500 - begin - 1)
            assert offsets(taken) == list(range(begin, 500)), "nothing is left out"
            assert handled == list(range(len(handled)))
            assert 0 < begin <= len(handled), "and only what was not stored comes again"
            await successor.acknowledge(taken)
    async with desk(rabbit, store) as on, reader(on, "killed") as one:
        await one.expect_nothing(0.2)


# ------------------------------------------------------------------ seek


async def test_back_to_the_beginning(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(10)
        await one.acknowledge(await one.take(10))
        await one.flush()
        await one.source.seek("earliest")
        assert on.stored() == 0, "durable at once"
        assert offsets(await one.take(10)) == list(range(10))


async def test_ahead_and_what_was_taken_is_lost(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(500)
        taken = await one.take(10)
        await one.source.seek("latest")
        assert on.stored() == 500
        errors = await one.settle(taken)
        assert {type(error) for error in errors} == {PartitionRevoked}
        await one.expect_nothing(0.2)
        await on.fill(1, first=500)
        (delivery,) = await one.take(1)
        assert offsets([delivery]) == [500]
        await one.acknowledge([delivery])
        await one.flush()
        assert on.stored() == 501


@pytest.mark.parametrize(("to", "expected"), [({0: 7}, 7), ({0: 10_000}, 500)])
async def test_to_an_offset(on: Desk, to: dict[int, int], expected: int) -> None:
    async with reader(on, stream={"prefetch": 20}) as one:
        await on.fill(500)
        await one.take(100)
        await one.source.seek(to)
        await on.fill(1, first=500)
        assert offsets(await one.take(1)) == [expected]


async def test_to_a_time(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(5)
        between = await next_second()
        await on.fill(5, first=5)
        await one.take(10)
        await one.source.seek(between)
        assert offsets(await one.take(5)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("to", ["first", datetime(2026, 1, 1), {}, {1: 5}, {0: -1}, {0: "x"}, {0: True}, 5])
async def test_what_is_no_place_is_refused(on: Desk, to: Any) -> None:
    async with reader(on) as one:
        with pytest.raises(ValueError, match=r"needed|partition|offset|time zone"):
            await one.source.seek(to)


async def test_who_stands_by_cannot_seek(on: Desk) -> None:
    async with reader(on), reader(on) as second:
        with pytest.raises(BrokerUnavailable, match="another process reads it"):
            await second.source.seek("earliest")


async def test_a_seek_that_cannot_be_stored_moves_nothing(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(on) as one:
        await on.fill(10)
        taken = await one.take(5)
        bookmark = readership_of(one)._bookmark
        with monkeypatch.context() as patch:
            patch.setattr(bookmark, "store", failing(BrokerUnavailable("away")))
            with pytest.raises(BrokerUnavailable, match="away"):
                await one.source.seek("latest")
        taken += await one.take(5)
        assert offsets(taken) == list(range(10))
        await one.acknowledge(taken)
        await eventually(lambda: on.stored() == 10)


def failing(error: Exception) -> Any:
    async def fail(*_: object) -> bool:
        raise error

    return fail


async def test_an_app_seeks_while_it_runs(rabbit: Rabbit) -> None:
    seen: list[int] = []

    @subscriber(Stream(NAME, store=MemoryOffsets()))
    async def handle(number: int) -> None:
        seen.append(number)

    async with desk(rabbit) as on, app_of(rabbit, handle).running() as app:
        await on.fill(1000)
        await eventually(lambda: len(seen) == 1000)
        await app.seek(handle, {0: 990})
        await eventually(lambda: len(seen) == 1010)
    assert seen == [*range(1000), *range(990, 1000)]


# ------------------------------------------------------------------ apps


async def test_batches_their_place_and_their_headers(rabbit: Rabbit) -> None:
    seen: list[list[int]] = []

    @subscriber(Stream(NAME, store=MemoryOffsets()), batch=Batch(size=10, wait=0.2))
    async def handle(some: list[int]) -> None:
        seen.append(some)

    async with desk(rabbit) as on, app_of(rabbit, handle).running():
        await on.fill(25)
        await eventually(lambda: sum(map(len, seen)) == 25)
    assert [number for some in seen for number in some] == list(range(25))
    assert max(map(len, seen)) == 10


async def test_retries_are_in_place_and_dead_letters_tell_their_offset(rabbit: Rabbit) -> None:
    seen: list[tuple[int, int]] = []
    letters: list[Message] = []

    @subscriber(Stream(NAME, store=MemoryOffsets()), attempts=3, ordered_by="partition")
    async def handle(number: int, offset: Offset) -> None:
        seen.append((number, offset))
        if number == 1:
            raise Retry(after=0.01)

    @subscriber(f"{NAME}.dead")
    async def bury(message: Message) -> None:
        letters.append(message)

    async with desk(rabbit) as on, app_of(rabbit, handle, bury).running():
        await on.fill([b"0", b"1", b"not a number", b"3"])
        await eventually(lambda: len(letters) == 2)
        await eventually(lambda: len(seen) == 5)
    assert seen == [(0, 0), (1, 1), (1, 1), (1, 1), (3, 3)]
    assert [(letter.body, letter.headers[ORIGIN_OFFSET]) for letter in letters] == [(b"1", "1"), (b"not a number", "2")]


async def test_what_others_publish(on: Desk) -> None:
    """By an exchange, without an id, with a routing key for the key."""
    options: dict[str, Any] = {"exchange": Exchange("all", "topic"), "bind": "e.*", "key": "routing_key"}
    async with reader(on, stream=options, ordered_by="key") as one:
        receipts = Receipts()
        channel = await on.connection.publisher.channel(confirms=True)
        channel.publish("all", "e.1", Properties(raw_headers={"n": 5}), b"x", receipts)
        assert await receipts.wait() == [None]
        (delivery,) = await one.take(1)
        assert (delivery.message_id, delivery.key, delivery.lane) == (f"{NAME}-0", "e.1", "e.1")
        assert delivery.headers.pairs == (("n", b"5"),)
        assert (delivery.exchange, delivery.routing_key) == ("all", "e.1")  # type: ignore[attr-defined]


async def test_headers_survive_in_their_order(on: Desk) -> None:
    async with reader(on) as one:
        pairs = [
            ("b", b"1"),
            ("a", None),
            ("x-own", b"\xff\x00"),
            ("content-type", b"text/plain"),
            ("c", bytes(70_000)),
        ]
        message = outgoing(NAME, b"x", key="k", headers=pairs)
        assert await send(on.connection, message) == [None]
        (delivery,) = await one.take(1)
        assert delivery.headers.pairs == message.headers.pairs
        assert (delivery.key, delivery.message_id) == ("k", message.message_id)


async def test_what_somebody_sends_to_the_lock_is_nothing_of_the_stream(rabbit: Rabbit, on: Desk) -> None:
    async with reader(on) as one, raw(rabbit) as other:
        await on.fill(2)
        await other.publish("", lock_name(NAME, "shop"), b"boo")
        await one.acknowledge(await one.take(2))
        await other.publish("", lock_name(NAME, "shop"), b"boo")
        await one.expect_nothing(0.2)
        await on.fill(2, first=2)
        assert offsets(await one.take(2)) == [2, 3]
        assert one.source.health().ok


@pytest.mark.parametrize("order", ["key", "partition", None])
async def test_lanes(on: Desk, order: Any) -> None:
    async with reader(on, ordered_by=order) as one:
        await on.fill([b"1"], key="a")
        (delivery,) = await one.take(1)
        assert delivery.lane == {"key": "a", "partition": NAME, None: None}[order]


# ------------------------------------------------------------------ another stream under the same name


@pytest.mark.parametrize("offset", ["first", "next"])
async def test_a_stream_that_was_not_there_any_more_is_read_from_its_beginning(
    rabbit: Rabbit, on: Desk, caplog: pytest.LogCaptureFixture, offset: Any
) -> None:
    async with reader(on, stream={"offset": offset}) as one, raw(rabbit) as other:
        await on.fill(10)
        await one.acknowledge(await one.take(10))
        await other.delete(NAME)
        await eventually(lambda: not one.source.health().ok)
        await eventually(lambda: one.source.health().ok)  # it was declared again
        await on.fill(30, first=100)
        taken = await one.take(30)
        assert [delivery.body for delivery in taken] == numbers(range(100, 130))
        await one.acknowledge(taken)
        await one.flush()
        assert on.stored() == 30
    assert "made anew (it was not there any more); the group begins it at offset 0" in caplog.text


async def made_anew(on: Desk, one: Member, count: int) -> None:
    """By somebody else, before the reader looks for it. Numbers from 100 on."""
    readership = readership_of(one)
    async with readership._opening, raw(on.server) as other:
        await other.delete(NAME)
        await eventually(lambda: readership.reader is None)
        await other.declare(NAME, queue_type="stream")
        await on.fill(count, first=100)


@pytest.mark.parametrize("transport", ["aiormq", "fast"])
@pytest.mark.parametrize(("offset", "begin"), [("first", 0), (20, 20)])
async def test_a_stream_that_others_made_anew_is_known_by_its_messages(
    rabbit: Rabbit, caplog: pytest.LogCaptureFixture, transport: str, offset: Any, begin: int
) -> None:
    async with desk(rabbit, transport=transport) as on, reader(on, stream={"offset": offset}) as one:
        await on.fill(10)
        await one.acknowledge(await one.take(10))
        await made_anew(on, one, 30)
        taken = await one.take(30 - begin)
        assert offsets(taken) == list(range(begin, 30))
        assert [delivery.body for delivery in taken] == numbers(range(100 + begin, 130))
        await one.acknowledge(taken)
        await one.flush()
        assert on.stored() == 30
        assert one.source.health().ok
        await eventually(lambda: one.source.gauges()["lag"] == 0)
    assert f"(offset 9 is not the message that was read there); the group begins it at offset {begin}" in caplog.text


async def test_a_stream_that_others_made_anew_and_shorter(
    rabbit: Rabbit, on: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    async with reader(on) as one:
        await on.fill(10)
        await one.acknowledge(await one.take(10))
        await made_anew(on, one, 3)
        taken = await one.take(3)
        assert [delivery.body for delivery in taken] == numbers(range(100, 103))
        await one.acknowledge(taken)
        await one.flush()
        assert on.stored() == 3
        await eventually(lambda: one.source.gauges()["lag"] == 0)
    assert "it ends at 3, before 10" in caplog.text


async def test_a_new_stream_that_cannot_be_stored_is_no_old_one_for_that(
    on: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reader(on) as one:
        await on.fill(10)
        await one.acknowledge(await one.take(10))
        await one.flush()
        with monkeypatch.context() as patch:
            patch.setattr(readership_of(one)._bookmark, "store", failing(BrokerUnavailable("away")))
            await made_anew(on, one, 30)
            await one.expect_nothing(0.5)
        assert offsets(await one.take(30)) == list(range(30))


@pytest.mark.parametrize("place", ["memory", "postgres"])
async def test_a_stream_that_was_made_anew_while_the_group_was_away(
    rabbit: Rabbit, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    store = MemoryOffsets() if place == "memory" else PostgresOffsets(request.getfixturevalue("database").dsn)
    async with desk(rabbit, store) as on:
        async with reader(on) as one:
            await on.fill(10)
            taken = await one.take(10)
            await one.acknowledge(taken[:6])
            await one.flush()
            await one.acknowledge(taken[6:8])
        async with reader(on) as one:
            assert offsets(await one.take(2)) == [8, 9], "it is the same"
        async with reader(on) as one:
            assert offsets(await one.take(2)) == [8, 9], "also to who handled nothing of it"
            await on.cut()
            await publish(on, 1, 10)
            assert offsets(await one.take(1)) == [10]
        assert "made anew" not in caplog.text
        async with reader(on) as one:
            await one.acknowledge(await one.take(3))
        async with raw(rabbit) as other:
            await other.delete(NAME)
            await other.declare(NAME, queue_type="stream")
        await on.fill(30, first=100)
        async with reader(on) as one:
            taken = await one.take(30)
            assert [delivery.body for delivery in taken] == numbers(range(100, 130))
    assert "(offset 10 is not the message that was read there); the group begins it at offset 0" in caplog.text


async def test_what_was_deleted_while_the_group_was_away_is_new_to_it(
    on: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(on.store, MemoryOffsets)
    async with reader(on) as one:
        await on.fill(1)
        await one.acknowledge(await one.take(1))
    on.store.witnesses.clear()  # as a store that keeps none
    async with raw(on.server) as other:
        await other.delete(NAME)
    async with reader(on, stream={"offset": "next"}) as one:
        assert on.stored() == 0
        await on.fill(3, first=100)
        assert offsets(await one.take(3)) == [0, 1, 2]
    assert "made anew (it was not there any more); the group begins it at offset 0" in caplog.text


async def test_both_transports_know_a_message_again(rabbit: Rabbit, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryOffsets()
    for place, transport in enumerate(["aiormq", "fast", "aiormq"]):
        async with desk(rabbit, store, transport=transport) as on, reader(on) as one:
            channel = await on.connection.publisher.channel(confirms=True)
            receipts = Receipts()
            properties = Properties(message_id="ü", timestamp=1_700_000_000 + place, raw_headers={"n": 5})
            channel.publish("", NAME, properties, b"x", receipts)
            assert await receipts.wait() == [None]
            (delivery,) = await one.take(1)
            assert (offsets([delivery]), delivery.timestamp) == ([place], 1_700_000_000.0 + place)
            await one.acknowledge([delivery])
    assert "made anew" not in caplog.text


async def test_offsets_in_the_stream_itself_go_with_it(rabbit: Rabbit) -> None:
    async with desk(rabbit, ServerOffsets(rabbit.stream_url)) as on, raw(rabbit) as other:
        async with reader(on) as one:
            await on.fill(10)
            await one.acknowledge(await one.take(10))
            await one.flush()
            await made_anew(on, one, 30)
            taken = await one.take(30)
            assert [delivery.body for delivery in taken] == numbers(range(100, 130))
            await one.acknowledge(taken)
        await other.delete(NAME)
        await other.declare(NAME, queue_type="stream")
        await on.fill(50, first=200)
        async with reader(on) as one:
            taken = await one.take(50)
            assert [delivery.body for delivery in taken] == numbers(range(200, 250))


async def test_a_stream_that_comes_to_where_the_group_was_is_well(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a replica that had to catch up."""
    monkeypatch.setattr(stream_readership, "DOUBT", 600.0)
    await on.make()
    await on.fill(3)
    assert isinstance(on.store, MemoryOffsets)
    on.store.stored[Place(on.server.vhost, NAME, "shop")] = 5
    async with reader(on) as one:
        await eventually(lambda: "it ends at 3, before 5" in one.source.health().detail)
        await on.fill(4, first=3)
        assert offsets(await one.take(2)) == [5, 6]
        assert one.source.health().ok


async def test_an_offset_that_never_was_is_read_from_the_beginning(on: Desk) -> None:
    await on.make()
    await on.fill(3)
    assert isinstance(on.store, MemoryOffsets)
    on.store.stored[Place(on.server.vhost, NAME, "shop")] = 2**40
    async with reader(on) as one:
        await eventually(lambda: "before 1099511627776" in one.source.health().detail)
        assert offsets(await one.take(3)) == [0, 1, 2]
        assert one.source.health().ok


async def test_what_the_server_has_dropped_is_said_at_once(
    on: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_readership, "LOOK", 600.0)
    small = {"max_length_bytes": 2000, "arguments": {"x-stream-max-segment-size-bytes": 500}}
    async with reader(on, stream=small) as one:
        await on.fill([bytes(200)])
        await one.acknowledge(await one.take(1))
    for _ in range(60):
        await on.fill([bytes(200)])
    epoch = on.connection.consuming.current
    assert epoch is not None

    async def dropped() -> bool:
        return ((await survey(epoch, NAME)).first or 0) > 1

    await eventually(dropped)
    async with reader(on, stream=small) as one:
        (first,) = offsets(await one.take(1))
        await eventually(lambda: f"offsets 1 to {first - 1} are gone" in caplog.text)
    assert "made anew" not in caplog.text


# ------------------------------------------------------------------ trouble


async def test_a_store_that_is_away_is_waited_for(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(on) as one:
        await on.fill(5)
        taken = await one.take(5)
        with monkeypatch.context() as patch:
            patch.setattr(readership_of(one)._bookmark, "store", failing(BrokerUnavailable("no answer")))
            await one.acknowledge(taken)
            await eventually(lambda: "no answer" in one.source.health().detail)
            await on.fill(2, first=5)
            await one.acknowledge(await one.take(2))
        await eventually(lambda: one.source.health().ok)
        assert on.stored() == 7


async def test_a_store_that_refuses_ends_the_source(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(on) as one:
        await on.fill(1)
        taken = await one.take(1)
        with monkeypatch.context() as patch:
            patch.setattr(readership_of(one)._bookmark, "store", failing(BrokerRefused("no such table")))
            await one.acknowledge(taken)
            with pytest.raises(BrokerRefused, match="no such table"):
                await one.poll(5)
            assert not one.source.health().ok


async def test_a_mistake_of_a_store_is_said_and_ends_the_source(on: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader(on) as one:
        await on.fill(1)
        taken = await one.take(1)
        with monkeypatch.context() as patch:
            patch.setattr(readership_of(one)._bookmark, "store", failing(ZeroDivisionError("oops")))
            await one.acknowledge(taken)
            with pytest.raises(BrokerRefused, match="oops"):
                await one.poll(5)


async def test_a_closed_source_says_so(on: Desk) -> None:
    async with reader(on) as one:
        await on.fill(1)
        taken = await one.take(1)
    for call in (one.source.settle([Settlement(taken[0], ACK)]), one.source.seek("earliest"), one.source.reopen()):
        with pytest.raises(BrokerClosed):
            await call
    assert not one.source.health().ok


async def test_the_lag(on: Desk) -> None:
    async with reader(on, stream={"prefetch": 10}) as one:
        for place in range(20):
            await on.fill(10, first=place * 10)
        taken = await one.take(5)
        await eventually(lambda: one.source.gauges() == {"lag": 200, "open": 5, "partitions": 1})
        await one.acknowledge(taken)
        await one.acknowledge(await one.take(195))
        await eventually(lambda: one.source.gauges() == {"lag": 0, "open": 0, "partitions": 1})


# ------------------------------------------------------------------ declaring


async def test_a_queue_that_is_no_stream(rabbit: Rabbit, on: Desk) -> None:
    async with raw(rabbit) as other:
        await other.declare(NAME)
    with pytest.raises(TopologyMismatch, match="x-queue-type"):
        async with reader(on):
            pass


async def test_declared_by_others(rabbit: Rabbit, on: Desk) -> None:
    with pytest.raises(NotFound):
        async with reader(on, stream={"declare": "passive"}):
            pass
    async with raw(rabbit) as other:
        await other.declare(NAME, queue_type="stream", max_age="1h")
    for mode in ("passive", "off"):
        async with reader(on, stream={"declare": mode}) as one:
            await on.fill(1)
            await one.acknowledge(await one.take(1))
    async with reader(on, "other", stream={"max_age": "1h"}):
        pass
    with pytest.raises(TopologyMismatch, match="x-max-age"):
        async with reader(on, "other", stream={"max_age": 1800.0}):
            pass


async def test_who_may_not_lock_is_told(rabbit: Rabbit) -> None:
    async with raw(rabbit) as other:
        await other.declare(NAME, queue_type="stream")
    await asyncio.to_thread(rabbit.permit, f"^{NAME}$")
    async with desk(rabbit) as on:
        with pytest.raises(AccessRefused, match=r"events\.shop\.reader"):
            async with reader(on, stream={"declare": "off"}):
                pass


@pytest.mark.parametrize(
    ("stream", "mistake"),
    [
        (Stream(NAME), "store=None"),
        (Stream(NAME, store="postgres://x"), "store='postgres://x'"),  # type: ignore[arg-type]
        (Stream("", store=MemoryOffsets()), "the name is empty"),
        (Stream("n" * 250, store=MemoryOffsets()), "reader holds"),
        (Stream(NAME, offset="begin", store=MemoryOffsets()), "offset='begin'"),  # type: ignore[arg-type]
        (Stream(NAME, offset=-1, store=MemoryOffsets()), "offset=-1"),
        (Stream(NAME, offset=True, store=MemoryOffsets()), "offset=True"),
        (Stream(NAME, offset=datetime(2026, 1, 1), store=MemoryOffsets()), "time zone"),
        (Stream(NAME, prefetch=0, store=MemoryOffsets()), "Stream(prefetch=0)"),
        (Stream(NAME, max_age=0, store=MemoryOffsets()), "max_age=0"),
        (Stream(NAME, max_age="1 h", store=MemoryOffsets()), "max_age='1 h'"),
        (Stream(NAME, max_length_bytes=-5, store=MemoryOffsets()), "max_length_bytes=-5"),
        (Stream(NAME, declare="never", store=MemoryOffsets()), "declare='never'"),  # type: ignore[arg-type]
        (Stream(NAME, bind="x", store=MemoryOffsets()), "say of which exchange"),
        (Stream(NAME, arguments={"x-max-length": 1}, store=MemoryOffsets()), "a stream queue has no such argument"),
        (Stream(NAME, arguments={"x-max-age": "1h"}, store=MemoryOffsets()), "said by max_age="),
        (Stream(f"{NAME}.dead", store=MemoryOffsets()), "come back for ever"),
    ],
)
def test_mistakes_are_found_before_anything_runs(stream: Stream, mistake: str) -> None:
    dead = f"{NAME}.dead"
    broker = RabbitBroker("amqp://localhost")
    told = list(broker.mistakes(Subscription(stream.name, "shop", source=stream, dead_letter=dead)))
    assert [one for one in told if mistake in one]


def test_what_a_stream_can_do() -> None:
    broker = RabbitBroker("amqp://localhost")
    stream = Stream(NAME, store=MemoryOffsets())
    subscription = Subscription(NAME, "shop", source=stream)
    assert list(broker.mistakes(subscription)) == []
    found = broker.capabilities_of(subscription)
    assert (found.settlement, found.retry, found.release, found.seek) == ("positional", False, False, True)
    assert found.attempts == "process"
    assert sorted(found.ordered_by) == ["key", "partition"]
    assert not found.transactions
    assert stream.queue_arguments() == {"x-queue-type": "stream"}
    options: dict[str, Any] = {"max_age": 3600.0, "max_length_bytes": 10**9, "arguments": {"x-initial-cluster-size": 1}}
    full = Stream(NAME, store=MemoryOffsets(), **options)
    assert full.queue_arguments() == {
        "x-queue-type": "stream",
        "x-max-age": "3600s",
        "x-max-length-bytes": 10**9,
        "x-initial-cluster-size": 1,
    }


async def test_offsets_in_the_stream_itself(rabbit: Rabbit) -> None:
    """What is stored there takes offsets, so there are gaps."""
    async with desk(rabbit, ServerOffsets(rabbit.stream_url)) as on:
        async with reader(on) as one:
            await on.fill(5)
            taken = await one.take(5)
            await one.acknowledge(taken[:3])
            await one.flush()
            await on.fill(2, first=5)
            taken += await one.take(2)
            assert [delivery.body for delivery in taken] == numbers(range(7))
            assert offsets(taken)[-1] > 6
        async with reader(on) as one:
            again = await one.take(4)
            assert [delivery.body for delivery in again] == numbers(range(3, 7))
            await one.acknowledge(again)
        async with reader(on) as one:
            await one.expect_nothing(0.2)
            await one.source.seek("earliest")
            (first,) = await one.take(1)
            assert first.body == b"0"
