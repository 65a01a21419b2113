"""The conformance suite over the synthetic log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from streamfw import App, subscriber
from streamfw.broker import Broker, Delivery, Settlement, Subscription
from streamfw.errors import PartitionRevoked, SettleError
from streamfw.message import Outgoing, new_message_id
from streamfw.outcome import ACK
from streamfw.testing._positional import PositionalSource
from streamfw.testing.conformance import BrokerConformance
from streamfw.testing.synthetic import PositionalBroker
from tests.helpers import eventually


class TestPositionalBroker(BrokerConformance):
    @pytest.fixture
    def broker(self) -> Broker:
        return PositionalBroker()

    async def interrupt(self, broker: Broker) -> bool:
        assert isinstance(broker, PositionalBroker)
        await broker.cut()
        return True


# ------------------------------------------------------------------ what only a log has

MIB = 2**20


def numbered(count: int, keys: int = 16) -> list[Outgoing]:
    return [
        Outgoing(name="orders", body=b"%d" % number, key=f"key-{number % keys}", message_id=new_message_id())
        for number in range(count)
    ]


class RecordingPump:
    """What a source asked of its pump."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.drop: Callable[[Delivery], bool] | None = None

    def hold(self) -> None:
        self.calls.append("hold")

    async def quiesce(self, seconds: float, finish: Callable[[Delivery], bool] | None = None) -> bool:
        self.calls.append("quiesce")
        return True

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None:
        self.calls.append("release")
        self.drop = drop

    def take_back(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        return ()

    def vouch(self, seconds: float, look: Callable[[], None]) -> None: ...


async def test_a_joining_source_takes_half_and_only_that_is_lost() -> None:
    broker, pump = PositionalBroker(), RecordingPump()
    async with broker.connect() as connection:
        first = await connection.open(Subscription("orders", pump=pump))
        await connection.publish(numbered(64))
        taken = await first.fetch(100, MIB)
        assert len(taken) == 64
        assert pump.calls == []
        second = await connection.open(Subscription("orders"))
        assert pump.calls == ["hold", "quiesce", "release"]
        assert pump.drop is not None
        moved = [delivery for delivery in taken if delivery.lost]
        assert 0 < len(moved) < 64
        assert [delivery for delivery in taken if pump.drop(delivery)] == moved
        errors = await first.settle([Settlement(delivery, ACK) for delivery in taken])
        assert [error.delivery for error in errors] == moved
        assert {type(error) for error in errors} == {PartitionRevoked}
        again = await second.fetch(100, MIB)
        assert sorted(d.message_id for d in again) == sorted(d.message_id for d in moved)


async def test_a_partition_that_comes_back_is_a_new_epoch() -> None:
    broker = PositionalBroker(partitions=1)
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(10))
        taken = await source.fetch(10, MIB)
        assert not await source.settle([Settlement(delivery, ACK) for delivery in (*taken[:4], *taken[6:])])
        await broker.revoke("orders")
        assert broker.committed("orders") == {0: 4}
        again = await source.fetch(10, MIB)
        assert [delivery.body for delivery in again] == [b"%d" % number for number in range(4, 10)]
        assert len(await source.settle([Settlement(delivery, ACK) for delivery in taken[4:6]])) == 2
        assert not await source.settle([Settlement(delivery, ACK) for delivery in again])
        # Ten messages and the marker behind the seventh.
        assert broker.committed("orders") == {0: 11}


async def test_an_abrupt_loss_commits_nothing() -> None:
    broker = PositionalBroker(partitions=1)
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(10))
        taken = await source.fetch(10, MIB)
        await source.settle([Settlement(delivery, ACK) for delivery in taken[:9]])
        await broker.revoke("orders", abrupt=True)
        assert broker.committed("orders") == {}
        assert len(await source.fetch(100, MIB)) == 10


async def test_positions_are_committed_now_and_then_and_by_flush() -> None:
    broker = PositionalBroker(partitions=1, commit_every=5)
    async with broker.connect() as connection:
        source = await connection.open(Subscription("orders"))
        await connection.publish(numbered(10))
        taken = await source.fetch(10, MIB)
        await source.settle([Settlement(delivery, ACK) for delivery in taken[:3]])
        assert broker.committed("orders") == {}
        await source.flush(0.0)
        assert broker.committed("orders") == {0: 3}
        await source.settle([Settlement(delivery, ACK) for delivery in taken[3:6]])
        assert broker.committed("orders") == {0: 6}


async def test_no_partition_is_starved() -> None:
    async with PositionalBroker().connect() as connection:
        source = await connection.open(Subscription("orders", ordered_by="partition"))
        await connection.publish(numbered(400, keys=50))
        lanes = [{delivery.lane for delivery in await source.fetch(5, MIB)} for _ in range(8)]
        assert [len(of_one) for of_one in lanes] == [1] * 8
        assert set.union(*lanes[:4]) == set.union(*lanes[4:]) == {0, 1, 2, 3}


@pytest.fixture(params=[0.0, 0.004], ids=["settles at once", "settles slowly"])
def settle_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    seconds: float = request.param
    settle = PositionalSource.settle

    async def slowly(self: PositionalSource, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        await asyncio.sleep(seconds)
        return await settle(self, settlements)

    if seconds:
        monkeypatch.setattr(PositionalSource, "settle", slowly)
    return seconds


@pytest.mark.usefixtures("settle_seconds")
@pytest.mark.parametrize("order", [None, "key", "partition"])
@pytest.mark.parametrize("members", [1, 3])
async def test_partitions_that_move_lose_nothing_and_repeat_nothing(members: int, order: str | None) -> None:
    """The pump is held while partitions move: what ran is settled, so only a wait that ran out repeats anything."""
    broker = PositionalBroker(drain=5.0)
    handled: list[tuple[str, int]] = []

    @subscriber("orders", workers=4, ordered_by=order)  # type: ignore[arg-type]
    async def handle(number: int) -> None:
        await asyncio.sleep(0.001)
        handled.append((f"key-{number % 16}", number))

    apps = [App(handle, name="shop", brokers={"default": broker}) for _ in range(members)]
    async with apps[0].running():
        await apps[0].connection().publish(numbered(600))
        for app in apps[1:]:
            await asyncio.wait_for(asyncio.shield(_join(app, broker, handled)), 20)
        while len(set(handled)) < 600:
            done = len(set(handled))
            await broker.revoke("orders", "shop")
            await eventually(lambda: len(set(handled)) > done)  # noqa: B023 - awaited at once
    counts = Counter(handled)
    assert set(counts) == {(f"key-{number % 16}", number) for number in range(600)}
    assert [entry for entry, count in counts.items() if count > 1] == []
    if order is not None:
        for key in range(16):
            assert [number for of_key, number in handled if of_key == f"key-{key}"] == list(range(key, 600, 16))


async def _join(app: App, broker: PositionalBroker, handled: list[tuple[str, int]]) -> None:
    """Run `app` for a while: its joining and its leaving move partitions."""
    async with app.running():
        before = len(handled)
        await eventually(lambda: len(handled) > before + 50)
