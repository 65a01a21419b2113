"""The conformance suite over MemoryBroker."""

from __future__ import annotations

import pytest

from streamfw.broker import Broker
from streamfw.memory import MemoryBroker
from streamfw.testing.conformance import BrokerConformance


class TestMemoryBroker(BrokerConformance):
    @pytest.fixture
    def broker(self) -> Broker:
        return MemoryBroker(max_body=2 * 1024 * 1024)


class TestNamedMemoryBroker(BrokerConformance):
    """Two broker objects of one name share their messages, as two processes share a server."""

    @pytest.fixture
    def broker(self, name: str) -> Broker:
        return MemoryBroker(f"memory://{name}", max_body=2 * 1024 * 1024)

    def another(self, broker: Broker) -> Broker:
        return MemoryBroker(broker.url, max_body=2 * 1024 * 1024)
