"""The conformance suite over the synthetic log."""

from __future__ import annotations

import pytest

from streamfw.broker import Broker
from streamfw.testing.conformance import BrokerConformance
from streamfw.testing.synthetic import PositionalBroker


class TestPositionalBroker(BrokerConformance):
    @pytest.fixture
    def broker(self) -> Broker:
        return PositionalBroker()

    async def interrupt(self, broker: Broker) -> bool:
        assert isinstance(broker, PositionalBroker)
        await broker.cut()
        return True
