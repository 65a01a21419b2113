"""The conformance suite over KafkaBroker, on a real node."""

from __future__ import annotations

from typing import Any

import pytest

from streamfw.broker import Broker
from streamfw.testing.conformance import BrokerConformance
from streamfw_kafka import KafkaBroker
from tests.brokers.kafka_cut import cut_everything
from tests.services.kafka import Kafka

QUICK: dict[str, Any] = {
    "create_topics": True,
    "partitions": 4,
    "heartbeat": 0.1,
    "session_timeout": 6.0,
    "commit_every": 0.05,
    "metadata_age": 2.0,
}


class TestKafka(BrokerConformance):
    grace = 5.0
    quiet = 0.5
    patience = 20.0

    @pytest.fixture
    def broker(self, kafka: Kafka) -> Broker:
        return KafkaBroker(kafka.url, **QUICK)

    def another(self, broker: Broker) -> Broker:
        return KafkaBroker(broker.url, **QUICK)

    def unreachable(self, broker: Broker, password: str) -> Broker:
        return KafkaBroker(f"kafka://somebody:{password}@127.0.0.1:1", **QUICK)

    async def interrupt(self, broker: Broker) -> bool:
        """Every connection of this process is cut, without a word."""
        cut_everything()
        return True
