"""The conformance suite over the synthetic broker that pushes."""

from __future__ import annotations

import asyncio

import pytest

from streamfw import App, subscriber
from streamfw.broker import Broker, Settlement, Subscription
from streamfw.errors import BrokerUnavailable, StaleDelivery, Unavailable, Unroutable
from streamfw.message import Outgoing, new_message_id
from streamfw.outcome import ACK, RELEASE
from streamfw.testing.conformance import BrokerConformance
from streamfw.testing.synthetic import PushBroker
from tests.helpers import eventually


class TestPushBroker(BrokerConformance):
    @pytest.fixture
    def broker(self) -> Broker:
        return PushBroker()

    async def interrupt(self, broker: Broker) -> bool:
        assert isinstance(broker, PushBroker)
        broker.cut()
        return True


# ------------------------------------------------------------------ what only channels have

MIB = 2**20


def numbered(count: int) -> list[Outgoing]:
    return [Outgoing(name="orders", body=b"%d" % n, message_id=new_message_id()) for n in range(count)]


async def test_tags_begin_again_with_each_channel_and_old_ones_settle_nothing() -> None:
    broker = PushBroker()
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(3))
        before = list(await source.fetch(3, MIB))
        broker.cut()
        assert all(delivery.lost for delivery in before)
        with pytest.raises(BrokerUnavailable):
            await source.fetch(3, MIB)
        await source.reopen()
        after = list(await source.fetch(3, MIB))
        assert [d.tag for d in after] == [d.tag for d in before] == [1, 2, 3]  # type: ignore[attr-defined]
        assert [d.body for d in after] == [d.body for d in before]
        errors = await source.settle([Settlement(delivery, ACK) for delivery in before])
        assert [type(error) for error in errors] == [StaleDelivery] * 3
        assert not await source.settle([Settlement(delivery, ACK) for delivery in after])
        assert broker.frames == 1


async def test_acknowledgements_are_grouped_as_far_as_nothing_is_open() -> None:
    broker = PushBroker()
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(100))
        taken = list(await source.fetch(100, MIB))
        await source.settle([Settlement(delivery, ACK) for delivery in reversed(taken[:50])])
        assert broker.frames == 1, "fifty in one"
        await source.settle([Settlement(delivery, ACK) for delivery in taken[51:54]])
        assert broker.frames == 4, "three singly, for one before them is open"
        await source.settle([Settlement(taken[50], ACK)])
        await source.settle([Settlement(taken[54], RELEASE), *(Settlement(d, ACK) for d in taken[55:])])
        assert broker.frames == 6
        (again,) = await source.fetch(100, MIB)
        assert again.body == b"54"


async def test_what_was_not_written_before_a_cut_was_not_said() -> None:
    broker = PushBroker()
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(2))
        first, second = await source.fetch(2, MIB)
        await source.settle([Settlement(first, ACK)])
        await source.flush(asyncio.get_running_loop().time() + 5)
        await source.settle([Settlement(second, ACK)])
        broker.cut()
        await source.reopen()
        assert [delivery.body for delivery in await source.fetch(2, MIB)] == [b"1"]


async def test_the_window_bounds_what_is_out() -> None:
    async with PushBroker().connect() as connection:
        first = await connection.open(Subscription("orders", prefetch=3))
        await connection.publish(numbered(10))
        second = await connection.open(Subscription("orders", prefetch=100))
        assert len(await first.fetch(10, MIB)) == 3
        assert [delivery.body for delivery in await second.fetch(10, MIB)] == [b"%d" % n for n in range(3, 10)]


async def test_out_of_reach_everything_says_so() -> None:
    broker = PushBroker()
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        with broker.outage():
            (error,) = await connection.publish(numbered(1))
            assert type(error) is Unavailable
            assert not (await connection.check()).ok
            assert not source.health().ok
            for attempt in (source.reopen, lambda: connection.open(Subscription("orders"))):
                with pytest.raises(BrokerUnavailable):
                    await attempt()
            with pytest.raises(BrokerUnavailable):
                async with broker.connect():
                    pytest.fail("it cannot be reached")
        await source.reopen()
        assert source.health().ok


async def test_dead_letters_are_kept_from_the_moment_a_source_names_them() -> None:
    async with PushBroker().connect() as connection:
        letter = Outgoing(name="orders.dead", body=b"x", message_id=new_message_id())
        (error,) = await connection.publish([letter])
        assert type(error) is Unroutable
        await connection.open(Subscription("orders", dead_letter="orders.dead"))
        assert list(await connection.publish([letter])) == [None]
        source = await connection.open(Subscription("orders.dead"))
        assert len(await source.fetch(10, MIB)) == 1


async def test_an_app_survives_cuts_and_an_outage() -> None:
    broker = PushBroker()
    handled: list[int] = []

    @subscriber("orders", workers=4)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.001)
        handled.append(number)

    app = App(handle, name="shop", brokers={"default": broker})
    async with app.running():
        await app.connection().publish(numbered(300))
        for target in (50, 100):
            await eventually(lambda: len(set(handled)) >= target)  # noqa: B023 - awaited at once
            broker.cut()
            await eventually(lambda: app.health().ok)
        with broker.outage():
            await eventually(lambda: not app.health().ok)
        await eventually(lambda: set(handled) == set(range(300)))
        await eventually(lambda: app.health().ok)
