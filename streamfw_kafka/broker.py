"""`KafkaBroker`: what a URL and its options become, and how one connects with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Subscription

from .connection import KafkaConnection, subscription_mistakes
from .settings import Compression, Isolation, Sasl, Settings, parsed
from .topic import topic_of

__all__ = ["KafkaBroker"]


class KafkaBroker(Broker):
    """Apache Kafka 2.4 or later, over aiokafka.

    `url` is ``kafka://user:password@host:port,host:port/?option=value`` (``kafka+tls://`` over TLS). The options stand
    in the URL's query as well; given both ways, the argument wins. Times are in seconds, sizes in bytes.

    - `client_id`: what the server's log calls us.
    - `username`, `password`, `sasl`: ``PLAIN`` (the default with a user name), ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``.
    - `ca`, `cert`, `key`: files in PEM: whom to trust (default: the system's), and our own certificate and its key.
    - `create_topics`, `partitions`, `replication`: make topics that are missing when they are subscribed or published
      to, with so many partitions and replicas (-1: the server's defaults).
    - `isolation`: ``read_committed`` does not see records of aborted transactions, and waits for open ones.
    - `session_timeout`, `heartbeat`, `rebalance_timeout`, `max_poll_interval`: of the consumer group. A heartbeat's
      interval is how long the group pauses when its members change.
    - `rebalance_drain`: how long running handlers may finish before their partitions move; the whole group waits.
    - `static_member`: a name of this process that stays the same when it restarts (``group.instance.id``): a restart
      within `session_timeout` then moves no partition; but nobody takes over in that time.
    - `commit_every`, `commit_after`: seconds, or messages, between two commits; a killed process repeats what it did
      since the last.
    - `open_limit`, `window_limit`: how many messages of a partition may be unsettled, and how far apart they may be,
      before it is not read further.
    - `fetch_wait`: how long the server may wait for records.
    - `compression`: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``, of what is published.
    - `max_body`: the largest body that is published.
    - `linger`: how long a publish waits for others to go with it.
    - `publish_timeout`, `request_timeout`, `connect_timeout`, `commit_timeout`: how long each may take.
    - `metadata_age`: after how long topics and partitions are asked for again.

    Raises `ValueError`, naming the option, for a wrong value.
    """

    capabilities = Capabilities(
        settlement="positional",
        ordered_by=frozenset({"key", "partition"}),
        prefetch=500,
        transactions=True,
        publishing_transactions=True,
        seek=True,
        tombstones=True,
        max_body=1_000_000,
    )

    def __init__(
        self,
        url: str,
        *,
        client_id: str | None = None,
        username: str | None = None,
        password: str | None = None,
        sasl: Sasl | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        create_topics: bool | None = None,
        partitions: int | None = None,
        replication: int | None = None,
        isolation: Isolation | None = None,
        session_timeout: float | None = None,
        heartbeat: float | None = None,
        rebalance_timeout: float | None = None,
        rebalance_drain: float | None = None,
        commit_every: float | None = None,
        commit_after: int | None = None,
        commit_timeout: float | None = None,
        open_limit: int | None = None,
        window_limit: int | None = None,
        fetch_wait: float | None = None,
        max_poll_interval: float | None = None,
        static_member: str | None = None,
        compression: Compression | None = None,
        max_body: int | None = None,
        linger: float | None = None,
        request_timeout: float | None = None,
        publish_timeout: float | None = None,
        connect_timeout: float | None = None,
        metadata_age: float | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in Settings.__struct_fields__}
        super().__init__(url)
        self._settings = parsed(url, **given)
        self.capabilities = msgspec.structs.replace(KafkaBroker.capabilities, max_body=self._settings.max_body)

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        """Long pauses are taken back where there is a retry topic for them."""
        topic = topic_of(subscription)
        if not topic.retry_topic:
            return self.capabilities
        return msgspec.structs.replace(
            self.capabilities, retry=True, retry_after=topic.retry_after, overtaking=topic.overtaking
        )

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        """See `Broker.mistakes`."""
        return subscription_mistakes(subscription)

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """See `Broker.connect`."""
        return self._connected()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = KafkaConnection(self._settings)
        try:
            await connection.begin()
            yield connection
        finally:
            await connection.close()
