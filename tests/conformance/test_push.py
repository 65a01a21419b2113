"""The conformance suite over the synthetic broker that pushes."""

from __future__ import annotations

import pytest

from streamfw.broker import Broker
from streamfw.testing.conformance import BrokerConformance
from streamfw.testing.synthetic import PushBroker


class TestPushBroker(BrokerConformance):
    @pytest.fixture
    def broker(self) -> Broker:
        return PushBroker()

    async def interrupt(self, broker: Broker) -> bool:
        assert isinstance(broker, PushBroker)
        broker.cut()
        return True
