"""`RabbitBroker`: what a URL and its options become, and how one connects with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Subscription

from .connection import RabbitConnection, subscription_mistakes
from .publish import REPLY_TO
from .queue import Declare, RabbitQueue
from .settings import Auth, Settings, TransportOption, parsed
from .streams import Stream, capabilities_of_stream
from .topology import retries

__all__ = ["RabbitBroker"]

_RUNG = 1.0  # seconds: the lowest rung of the retry queues


class RabbitBroker(Broker):
    """RabbitMQ 3.10 or later, over AMQP 0-9-1.

    `url` is ``amqp://user:password@host:port,host:port/vhost?option=value`` (``amqps://`` over TLS). The options stand
    in the URL's query as well; given both ways, the argument wins. Times are in seconds, sizes in bytes.

    - `username`, `password`, `vhost`: instead of those in the URL.
    - `ca`, `cert`, `key`: files in PEM: whom to trust (default: the system's), and our own certificate and its key.
    - `auth`: ``plain`` (user and password), or ``external`` (by our certificate).
    - `name`: how the server's management calls our connections.
    - `heartbeat`: a peer that says nothing for twice as long is dead (0: none). `connect_timeout`: for a connection.
    - `transport`: ``fast`` takes deliveries, confirms and publishes past the client library, ``aiormq`` goes through
      ``auto`` is the fast one as long as it can be.
    - `declare`: ``declare`` makes what is missing, ``passive`` looks whether it is there, ``off`` does neither.
    - `delivery_limit`: of the queues that we declare; see `RabbitQueue`.
    - `max_body`: the largest body that is published. The server has a limit of its own (16 MiB from 4.0 on).
    - `window`, `window_bytes`: how many messages, and bytes of bodies, may be under way unconfirmed.
    - `publish_timeout`: for a publish to be answered. `blocked_timeout`: how long one waits, of it, for a server that
      takes no publishes (an alarm).
    - `priorities`: the highest of AMQP's priorities that is published with. A message of priority 0 has the middle one;
      queues have priorities where they were declared with them (``RabbitQueue(priorities=..)``).
    - `consumer_timeout`: as the server has it (default 30 min); half of it is warned about.

    Raises `ValueError`, naming the option, for a wrong value.
    """

    capabilities = Capabilities(
        settlement="sent",
        retry=True,
        retry_after=_RUNG,
        delay=_RUNG,
        ordered_by=frozenset({"key", "partition"}),
        replies=True,
        kept=False,
        max_body=16 * 1024 * 1024,
    )
    reply_patterns: ClassVar[tuple[str, ...]] = (f"{REPLY_TO}.*",)

    def __init__(
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        vhost: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        auth: Auth | None = None,
        name: str | None = None,
        heartbeat: int | None = None,
        connect_timeout: float | None = None,
        transport: TransportOption | None = None,
        declare: Declare | None = None,
        delivery_limit: int | None = None,
        max_body: int | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        publish_timeout: float | None = None,
        blocked_timeout: float | None = None,
        priorities: int | None = None,
        consumer_timeout: float | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in Settings.__struct_fields__}
        super().__init__(url)
        self._settings = settings = parsed(url, **given)
        self.capabilities = msgspec.structs.replace(
            RabbitBroker.capabilities,
            max_body=settings.max_body,
            priorities=settings.priorities > 0,
            delay=_RUNG if settings.declare == "declare" else None,
        )

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        """Long pauses are waited for on the server where queues can be made for them. Priorities are the queue's. A
        stream is a log."""
        source = subscription.source
        if isinstance(source, Stream):
            return capabilities_of_stream(self.capabilities)
        known = source is None or isinstance(source, RabbitQueue)
        return msgspec.structs.replace(
            self.capabilities,
            retry=known and retries(subscription, self._settings),
            priorities=isinstance(source, RabbitQueue) and source.priorities is not None,
        )

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        """See `Broker.mistakes`."""
        return subscription_mistakes(subscription, self._settings)

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """See `Broker.connect`."""
        return self._connected()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = RabbitConnection(self._settings)
        try:
            await connection.begin()
            yield connection
        finally:
            await connection.close()
