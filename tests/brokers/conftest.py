"""Fixtures of the tests of brokers: a RabbitMQ, over each transport, and somebody else beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamfw_rabbit.connection import RabbitConnection
from tests.brokers.rabbit_broker_kit import Raw, connected, raw
from tests.brokers.rabbit_kit import TRANSPORTS, TransportName
from tests.services.rabbit import Rabbit


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportName:
    name: TransportName = request.param
    return name


@pytest.fixture
async def connection(rabbit: Rabbit, transport: TransportName) -> AsyncIterator[RabbitConnection]:
    async with connected(rabbit, transport=transport) as opened:
        yield opened


@pytest.fixture
async def other(rabbit: Rabbit) -> AsyncIterator[Raw]:
    async with raw(rabbit) as opened:
        yield opened
