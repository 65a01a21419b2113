"""RabbitMQ as a streamfw broker: ``amqp://user:password@host/vhost`` and ``amqps://``."""

from typing import Annotated, TypeAlias

from streamfw.handler import DeliveryField

from .broker import RabbitBroker
from .channel import Properties
from .errors import TopologyMismatch
from .queue import Exchange, RabbitQueue

__all__ = [
    "Exchange",
    "MessageProperties",
    "Properties",
    "RabbitBroker",
    "RabbitQueue",
    "RoutingKey",
    "TopologyMismatch",
]

RoutingKey: TypeAlias = Annotated[str, DeliveryField("routing_key")]
"""Marks a parameter that takes the routing key that the message was published with: ``key: RoutingKey``."""

MessageProperties: TypeAlias = Annotated[Properties, DeliveryField("properties")]
"""Marks a parameter that takes AMQP's properties of the message, header table included, as they came."""
