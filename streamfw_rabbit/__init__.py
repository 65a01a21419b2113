"""RabbitMQ as a streamfw broker: ``amqp://user:password@host/vhost`` and ``amqps://``."""

from typing import Annotated, TypeAlias

from streamfw.handler import DeliveryField

from .broker import RabbitBroker
from .channel import Properties
from .errors import TopologyMismatch
from .offsets import MemoryOffsets
from .offsets_postgres import PostgresOffsets
from .offsets_server import ServerOffsets
from .queue import Exchange, RabbitQueue
from .streams import Stream

__all__ = [
    "Exchange",
    "MemoryOffsets",
    "MessageProperties",
    "Offset",
    "PostgresOffsets",
    "Properties",
    "RabbitBroker",
    "RabbitQueue",
    "RoutingKey",
    "ServerOffsets",
    "Stream",
    "TopologyMismatch",
]

RoutingKey: TypeAlias = Annotated[str, DeliveryField("routing_key")]
"""Marks a parameter that takes the routing key that the message was published with: ``key: RoutingKey``."""

MessageProperties: TypeAlias = Annotated[Properties, DeliveryField("properties")]
"""Marks a parameter that takes AMQP's properties of the message, header table included, as they came."""

Offset: TypeAlias = Annotated[int, DeliveryField("offset")]
"""Marks a parameter that takes a message's offset in its stream: ``offset: Offset``."""
