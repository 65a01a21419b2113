"""`RabbitBroker`: what a URL and its options become, and how one connects with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Subscription
from streamfw.ending import to_its_end

from .connection import RabbitConnection, may_order, subscription_mistakes
from .names import REPLY_TO
from .queue import Declare, RabbitQueue
from .settings import Auth, Settings, TransportOption, parsed
from .streams import Stream, capabilities_of_stream
from .topology import group_queue, retries

__all__ = ["RabbitBroker"]

_RUNG = 1.0  # seconds: the lowest rung of the retry queues


class RabbitBroker(Broker):
    """RabbitMQ 3.10 or later, over AMQP 0-9-1.

    `url` is ``amqp://user:password@host:port,host:port/vhost?option=value`` (``amqps://`` over TLS). The options stand
    in the URL's query as well; given both ways, the argument wins. Times are in seconds, sizes in bytes. What an option
    is when it is not given stands in parentheses.

    - `username` ("guest"): who logs in; better in the URL.
    - `password` ("guest"): with it; better in the URL, or in the environment.
    - `vhost` ("/"): which of the server's virtual hosts; better in the URL.
    - `ca` (none): over TLS, the file in PEM of whom to trust instead of the system's certificates.
    - `cert` (none): over TLS, the file in PEM of our own certificate; with `key`.
    - `key` (none): the file in PEM of the certificate's key.
    - `auth` ("plain"): ``plain`` (user and password), or ``external`` (by our certificate).
    - `name` ("streamfw"): how the server's management calls our connections.
    - `heartbeat` (15): a peer that says nothing for twice as long is dead; 0 is none.
    - `connect_timeout` (10.0): how long connecting may take.
    - `transport` ("auto"): ``fast`` takes deliveries, confirms and publishes past the client library; ``aiormq`` goes
      through the library with all of them; ``auto`` is the fast one as long as it can be.
    - `declare` ("declare"): ``declare`` makes what is missing, ``passive`` looks whether it is there, ``off`` does
      neither.
    - `delivery_limit` (20): how often a queue that we declare delivers a message that comes back unsettled; see
      `RabbitQueue`.
    - `max_body` (16777216): the largest body that is published. The server has a limit of its own (16 MiB from 4.0
      on).
    - `window` (1000): how many messages may be under way unconfirmed.
    - `window_bytes` (8388608): how many bytes of their bodies.
    - `publish_timeout` (30.0): how long a publish may take to be answered.
    - `blocked_timeout` (10.0): how long one waits, of that, for a server that takes no publishes (an alarm).
    - `priorities` (0): the highest of AMQP's priorities that is published with. A message of priority 0 has the middle
      one. Classic queues have priorities where they were declared with them (``RabbitQueue(priorities=..)``), quorum
      queues have them from 4.3 on, and take what has none for a 4, which is the middle of 8.
    - `consumer_timeout` (1800.0): after how long the server ends a channel (from 4.3 on: a consumer of a quorum queue)
      for a message that is not settled, as the server has it. What cannot be begun within half of it is given back,
      what runs for longer is warned about, and no retry is waited for in the process for longer.

    Raises `ValueError`, naming the option, for a wrong value.
    """

    capabilities = Capabilities(
        settlement="sent",
        retry=True,
        retry_after=_RUNG,
        delay=_RUNG,
        ordered_by=frozenset({"key", "partition"}),
        priorities_option="priorities",
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
        if source is not None and not isinstance(source, RabbitQueue):
            return self.capabilities  # which is refused
        # An order that is asked for and cannot be had is refused with its reason, in `mistakes`.
        ordered = subscription.ordered_by is not None or may_order(source, self._settings)
        return msgspec.structs.replace(
            self.capabilities,
            retry=retries(subscription, self._settings),
            ordered_by=self.capabilities.ordered_by if ordered else frozenset(),
            priorities=source is not None and source.priorities is not None,
            longest_pause=self._settings.consumer_timeout / 2,
        )

    def place(self, subscription: Subscription) -> Hashable:
        """A queue, which a plain name has for each group, and a `RabbitQueue` for all of them."""
        plain = subscription.source is None
        return group_queue(subscription.name, subscription.group) if plain else super().place(subscription)

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
            await to_its_end(connection.close())
