"""A cluster of three RabbitMQ nodes, one of which goes away while messages come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from streamfw.broker import Settlement
from streamfw.outcome import ACK
from streamfw.testing.conformance import Member
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.connection import RabbitConnection
from streamfw_rabbit.delivery import RabbitDelivery
from tests.brokers.rabbit_broker_kit import member, new_name, outgoing, send
from tests.brokers.rabbit_kit import TransportName
from tests.helpers import eventually
from tests.services import rabbit as services
from tests.services.rabbit import OwnCluster

# The first one starts three nodes.
pytestmark = [pytest.mark.xdist_group("rabbit-cluster"), pytest.mark.timeout(180)]

SOME = 200
Role = Literal["follower", "connected", "leader"]


@pytest.fixture(scope="module")
def three(services_directory: Path) -> Iterator[OwnCluster]:
    with services.cluster(services_directory) as made:
        yield made


class Traffic:
    """Publishes numbers, each until it is confirmed, and notes what comes of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.confirmed = 0
        self.tries: Counter[int] = Counter()
        self.handled: Counter[int] = Counter()
        self.fresh: Counter[int] = Counter()
        """How often one came that nobody had been given before."""

    async def publish(self, connection: RabbitConnection) -> None:
        while True:
            number = self.confirmed
            self.tries[number] += 1
            if await send(connection, outgoing(self.name, b"%d" % number)) == [None]:
                self.confirmed += 1

    async def consume(self, taker: Member) -> None:
        while True:
            for delivery in await taker.poll(0.5):
                assert isinstance(delivery, RabbitDelivery)
                self.fresh[int(delivery.body)] += not delivery.redelivered
                if not await taker.source.settle([Settlement(delivery, ACK)]):
                    self.handled[int(delivery.body)] += 1

    async def more(self, count: int = SOME) -> None:
        """Wait until so many more were confirmed, and all of them handled."""
        goal = self.confirmed + count
        await eventually(lambda: self.confirmed >= goal, 40)
        await eventually(lambda: all(self.handled[number] for number in range(goal)), 40)


async def cast(three: OwnCluster, role: Role, queue: str) -> tuple[int, int]:
    """Which node to connect to, and which one is to go away."""
    leader = await eventually(lambda: (three.leader(queue, 0),))
    others = [number for number in range(len(three)) if number != leader[0]]
    return {
        "follower": (leader[0], others[0]),
        "connected": (others[0], others[0]),
        "leader": (others[0], leader[0]),
    }[role]


# Which transport it is makes no difference to the cluster; each has its turn.
@pytest.mark.parametrize(
    ("role", "end", "transport"),
    [("follower", "stop", "fast"), ("connected", "kill", "aiormq"), ("leader", "kill", "fast")],
)
async def test_both_go_on_when_a_node_goes(three: OwnCluster, role: Role, end: str, transport: TransportName) -> None:
    await asyncio.to_thread(three.start_all)
    traffic = Traffic(new_name())
    async with RabbitBroker(three.url(0)).connect() as first:
        assert isinstance(first, RabbitConnection)
        async with member(first, traffic.name):
            pass
    queue = f"{traffic.name}.shop"
    await eventually(lambda: three.members(queue, 0) == len(three))
    connect, down = await cast(three, role, queue)
    async with RabbitBroker(three.url(connect), transport=transport).connect() as connection:
        assert isinstance(connection, RabbitConnection)
        async with member(connection, traffic.name) as taker:
            running = [asyncio.create_task(traffic.publish(connection)), asyncio.create_task(traffic.consume(taker))]
            await traffic.more()
            await asyncio.to_thread(three.stop if end == "stop" else three.kill, down)
            await traffic.more()
            assert not any(task.done() for task in running)
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            epochs = (connection.consuming.connects, connection.publisher.connects)
    assert epochs == ((2, 2) if role == "connected" else (1, 1))
    twice = {number for number, times in traffic.fresh.items() if times > traffic.tries[number]}
    assert twice == set(), "what comes again was given to somebody before, or published again"
    if role == "follower":
        assert set(traffic.tries.values()) == set(traffic.fresh.values()) == {1}
