"""The conformance suite where each name is a stream of RabbitMQ. Publishing is the same as to its queues, so it is left
to their suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from streamfw.broker import REPLY_PREFIX, Broker, Capabilities, Connection, Source, Subscription
from streamfw.testing.conformance._delivery import DeliveryConformance
from streamfw.testing.conformance._lifecycle import LifecycleConformance
from streamfw.testing.conformance._order import OrderConformance
from streamfw.testing.conformance._settlement import SettlementConformance
from streamfw_rabbit import MemoryOffsets, RabbitBroker, Stream, stream_readership
from streamfw_rabbit.connection import RabbitConnection
from tests.services.rabbit import Rabbit


def streamed(subscription: Subscription, store: MemoryOffsets) -> Subscription:
    """A plain name becomes a stream of that name. Dead letters and replies stay what they are."""
    name = subscription.name
    if subscription.source is None and not name.endswith(".dead") and not name.startswith(REPLY_PREFIX):
        subscription.source = Stream(name, store=store)
    return subscription


class StreamBroker(RabbitBroker):
    def __init__(self, url: str, store: MemoryOffsets | None = None) -> None:
        super().__init__(url)
        self.store = store or MemoryOffsets()

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        return super().capabilities_of(streamed(subscription, self.store))

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        return super().mistakes(streamed(subscription, self.store))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        async with super()._connected() as connection:
            assert isinstance(connection, RabbitConnection)
            opening = connection.open

            async def open_streamed(subscription: Subscription) -> Source:
                return await opening(streamed(subscription, self.store))

            connection.open = open_streamed  # type: ignore[method-assign]
            yield connection


class TestStreams(DeliveryConformance, SettlementConformance, OrderConformance, LifecycleConformance):
    grace = 5.0
    quiet = 0.15
    patience = 20.0

    @pytest.fixture
    def broker(self, rabbit: Rabbit) -> Broker:
        self.facts = rabbit
        return StreamBroker(rabbit.url)

    def another(self, broker: Broker) -> Broker:
        assert isinstance(broker, StreamBroker)
        return StreamBroker(broker.url, broker.store)

    @pytest.fixture(autouse=True)
    def quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_readership, "STAND_BY", 0.1)

    async def interrupt(self, broker: Broker) -> bool:
        await asyncio.to_thread(self.facts.close_connections)
        return True
