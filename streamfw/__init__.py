"""streamfw: an asyncio message framework.

    import msgspec
    from streamfw import App, subscriber

    class Order(msgspec.Struct):
        id: int
        item: str

    @subscriber("orders")
    async def ship(order: Order) -> None:
        print("shipping", order.item)

    app = App(ship)

    if __name__ == "__main__":
        app.run()

The broker comes from the configuration: ``STREAMFW_BROKERS__DEFAULT__URL``, or ``streamfw.toml``; the default is
``memory://``.
"""

from .app import App, AppHealth
from .broker import (
    Broker,
    Capabilities,
    Connection,
    DeadLetters,
    Delivery,
    Health,
    Position,
    PumpControl,
    Settlement,
    Source,
    Subscription,
    UnitOfWork,
)
from .codec import Codec, JsonCodec, MsgpackCodec, RawCodec
from .errors import (
    ArgumentError,
    Blocked,
    BrokerClosed,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    BuildError,
    ConfigError,
    DecodeError,
    LeaseLost,
    MessageError,
    NotRunning,
    OutcomeUnknown,
    PartialFailure,
    PartitionRevoked,
    PublishError,
    Rejected,
    ReplyTimeout,
    SettleError,
    StaleDelivery,
    StreamError,
    TooLarge,
    Unavailable,
    Unroutable,
    Unsupported,
    WorkerDied,
)
from .handler import Attempt, DeliveryField, Header, MessageBatch, State, UnitConnection
from .message import TOMBSTONE, Headers, Message, Outgoing
from .middleware import Middleware, Next
from .outcome import Ack, Backoff, DeadLetter, Drop, Outcome, Retry
from .outlet import NextPublish, PublishMiddleware
from .publisher import Publisher
from .router import Router
from .subscriber import Batch, subscriber
from .sync_publisher import SyncPublisher

__all__ = [
    "TOMBSTONE",
    "Ack",
    "App",
    "AppHealth",
    "ArgumentError",
    "Attempt",
    "Backoff",
    "Batch",
    "Blocked",
    "Broker",
    "BrokerClosed",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "BuildError",
    "Capabilities",
    "Codec",
    "ConfigError",
    "Connection",
    "DeadLetter",
    "DeadLetters",
    "DecodeError",
    "Delivery",
    "DeliveryField",
    "Drop",
    "Header",
    "Headers",
    "Health",
    "JsonCodec",
    "LeaseLost",
    "Message",
    "MessageBatch",
    "MessageError",
    "Middleware",
    "MsgpackCodec",
    "Next",
    "NextPublish",
    "NotRunning",
    "Outcome",
    "OutcomeUnknown",
    "Outgoing",
    "PartialFailure",
    "PartitionRevoked",
    "Position",
    "PublishError",
    "PublishMiddleware",
    "Publisher",
    "PumpControl",
    "RawCodec",
    "Rejected",
    "ReplyTimeout",
    "Retry",
    "Router",
    "SettleError",
    "Settlement",
    "Source",
    "StaleDelivery",
    "State",
    "StreamError",
    "Subscription",
    "SyncPublisher",
    "TooLarge",
    "Unavailable",
    "UnitConnection",
    "UnitOfWork",
    "Unroutable",
    "Unsupported",
    "WorkerDied",
    "subscriber",
]
