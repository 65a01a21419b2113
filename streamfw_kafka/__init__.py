"""Kafka as a streamfw broker, over aiokafka: ``kafka://host:port`` and ``kafka+tls://``."""

from typing import Annotated, TypeAlias

from aiokafka import AIOKafkaProducer

from streamfw.handler import DeliveryField, UnitConnection

from .broker import KafkaBroker
from .topic import Topic

__all__ = ["KafkaBroker", "Offset", "Partition", "Topic", "Transaction"]

Transaction: TypeAlias = Annotated[AIOKafkaProducer, UnitConnection()]
"""Marks a parameter that takes the transactional producer of ``transactional=True``: what it sends is seen with the end
of the message, or never. What the handler publishes through the app goes the same way, so few need it."""

Offset: TypeAlias = Annotated[int, DeliveryField("offset")]
"""Marks a parameter that takes the record's offset: ``offset: Offset``."""

Partition: TypeAlias = Annotated[int, DeliveryField("partition")]
"""Marks a parameter that takes the number of the record's partition: ``partition: Partition``."""
