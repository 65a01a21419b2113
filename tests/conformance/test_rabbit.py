"""The conformance suite over RabbitBroker, on a real node, over either transport."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from streamfw.broker import Broker
from streamfw.testing.conformance import BrokerConformance
from streamfw_rabbit import RabbitBroker
from tests.services.rabbit import Rabbit


class OnRabbit(BrokerConformance):
    grace = 5.0
    quiet = 0.5
    patience = 20.0
    transport: Literal["aiormq", "fast"]

    @pytest.fixture
    def broker(self, rabbit: Rabbit) -> Broker:
        self.facts = rabbit
        return RabbitBroker(rabbit.url, transport=self.transport)

    def another(self, broker: Broker) -> Broker:
        return RabbitBroker(broker.url, transport=self.transport)

    async def interrupt(self, broker: Broker) -> bool:
        """The server closes every connection to the vhost, as an operator does."""
        await asyncio.to_thread(self.facts.close_connections)
        return True


class TestOverAiormq(OnRabbit):
    """Deliveries, confirms and publishes through the client library."""

    transport = "aiormq"


class TestOverTheFastLane(OnRabbit):
    """The same past it."""

    transport = "fast"
