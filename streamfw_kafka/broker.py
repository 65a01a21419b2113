"""`KafkaBroker`: what a URL and its options become, and how one connects with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from streamfw.broker import Broker, Capabilities, Connection, Subscription
from streamfw.ending import to_its_end

from .connection import KafkaConnection, subscription_mistakes
from .settings import Compression, Isolation, Sasl, Settings, parsed
from .topic import topic_of

__all__ = ["KafkaBroker"]


class KafkaBroker(Broker):
    """Apache Kafka 2.4 or later, over aiokafka.

    `url` is ``kafka://user:password@host:port,host:port/?option=value`` (``kafka+tls://`` over TLS). The options stand
    in the URL's query as well; given both ways, the argument wins. Times are in seconds, sizes in bytes. What an option
    is when it is not given stands in parentheses.

    - `client_id` ("streamfw"): what the server's log calls us, and ``streamfw kafka status`` a member.
    - `username` (none): who logs in; better in the URL.
    - `password` (none): with it; better in the URL, or in the environment.
    - `sasl` (none): how: ``PLAIN`` (with a user name where nothing is given), ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``.
    - `ca` (none): over TLS, the file in PEM of whom to trust instead of the system's certificates.
    - `cert` (none): over TLS, the file in PEM of our own certificate; with `key`.
    - `key` (none): the file in PEM of the certificate's key.
    - `create_topics` (false): make topics that are missing when they are subscribed or published to.
    - `partitions` (-1): of a topic that is made; -1 is the server's default.
    - `replication` (-1): replicas of a topic that is made; -1 is the server's default.
    - `isolation` ("read_committed"): ``read_committed`` does not see records of aborted transactions, and waits for
      open ones.
    - `session_timeout` (45.0): how long the partitions of a killed process wait until another one has them.
    - `heartbeat` (0.4): between two signs of life, and about how long a group pauses when its members change.
    - `rebalance_timeout` (60.0): how long the group waits for its slowest member when partitions move.
    - `rebalance_drain` (1.0): how long running handlers may finish before their partitions move; the whole group waits.
    - `commit_every` (0.2): between two commits; a killed process repeats what it did since the last.
    - `commit_after` (5000): so many settled messages are committed earlier.
    - `commit_timeout` (5.0): how long a commit may take.
    - `open_limit` (10000): unsettled messages of a partition at which it is not read further.
    - `window_limit` (50000): messages from the oldest unsettled one to the newest at which it is not read further.
    - `fetch_wait` (0.1): how long the server may wait for records before it answers.
    - `max_poll_interval` (300.0): how long the client may stand still before it leaves the group.
    - `static_member` (none): a name of this process that stays the same when it restarts (``group.instance.id``): a
      restart within `session_timeout` then moves no partition; but nobody takes over in that time.
    - `compression` ("none"): ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``, of what is published.
    - `max_body` (1000000): the largest body that is published.
    - `linger` (0.0): how long a publish waits for others to go with it.
    - `request_timeout` (10.0): how long one request may take.
    - `publish_timeout` (30.0): how long a publish may take, however often it is sent.
    - `connect_timeout` (10.0): how long connecting may take.
    - `metadata_age` (10.0): after how long topics and partitions are asked for again.

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
            await to_its_end(connection.close())
