"""The servers of a cluster, and connections to them.

aiokafka's own client says of a connection that failed only that the node is "not ready", of a login that was refused
only that it is "unable to bootstrap", and it never looks at the servers of the URL again. So connections are made here,
where their errors are seen: one to a node for each use, made when it is needed and made again when it broke.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final, TypeAlias

from aiokafka.conn import AIOKafkaConnection, CloseReason, collect_hosts, create_conn
from aiokafka.errors import KafkaConnectionError, StaleMetadata
from aiokafka.protocol.metadata import MetadataRequest

from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError

from .errors import DRIVER_ERRORS, translated
from .settings import Settings, client_arguments

__all__ = ["Nodes", "diagnosed"]

_IDLE: Final = 540_000  # ms: less than the server's connections.max.idle.ms, so that we see it first
_NOT_OURS: Final = ("bootstrap_servers", "metadata_max_age_ms", "retry_backoff_ms")

Key: TypeAlias = "tuple[int, str]"


class Nodes:
    """The nodes by number, and a connection to each that was asked something. `controller` is who makes topics."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hosts = settings.bootstrap
        self._arguments = {n: v for n, v in client_arguments(settings).items() if n not in _NOT_OURS}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._connections: dict[Key, AIOKafkaConnection] = {}
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._learning: asyncio.Task[None] | None = None
        self._closed = False
        self.controller = -1

    # -- who there is

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the nodes, as last heard."""
        return self._addresses.keys()

    def heard(self, metadata: Any) -> None:
        """Take note of the nodes in a metadata response."""
        self._addresses = {number: (host, port) for number, host, port, *_ in metadata.brokers}
        self.controller = metadata.controller_id

    async def learn(self) -> None:
        """Ask the servers of the URL, all at once, who there is. Raises `BrokerError`."""
        self._check_open()
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn(), name="streamfw kafka nodes")
            self._learning.add_done_callback(self._learned)
        learning = self._learning
        await asyncio.wait([learning])
        if learning.cancelled():
            self._check_open()
        learning.result()

    def _learned(self, task: asyncio.Task[None]) -> None:
        self._learning = None
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may

    async def _learn(self) -> None:
        attempts = {
            asyncio.create_task(self._introduced(host, port)) for host, port, _ in collect_hosts(list(self._hosts))
        }
        errors: list[BrokerError] = []
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                for attempt in asyncio.as_completed(attempts):
                    try:
                        self.heard(await attempt)
                        return
                    except BrokerError as error:
                        errors.append(error)
        except TimeoutError as error:
            errors.append(translated(error, f"connecting to {', '.join(self._hosts)}"))
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
        # One that refuses us says more than one that is away.
        raise next((error for error in errors if not error.transient), errors[0])

    async def _introduced(self, host: str, port: int) -> Any:
        what = f"connecting to {host}:{port}"
        try:
            connection = await create_conn(host, port, **self._arguments)
            try:
                metadata = await self.sent(connection, MetadataRequest([]))
            finally:
                connection.close()
        except DRIVER_ERRORS as error:
            if isinstance(error, KafkaConnectionError | ConnectionResetError):
                what += self._why_hung_up(error)
            raise translated(error, what) from error
        if not metadata.brokers:  # a cluster that has only begun to start
            raise translated(StaleMetadata("no node is up yet"), what)
        return metadata

    def _why_hung_up(self, error: Exception) -> str:
        """A server says nothing to who speaks another protocol; nor does one that stops, so it may yet work later."""
        if self._settings.tls and isinstance(error, ConnectionResetError):
            return " (it hung up on us: does it speak TLS at this port?)"
        if not (self._settings.tls and self._settings.username):
            return " (it hung up on us: does it want a login, or TLS?)"
        return ""

    # -- connections

    async def connection(self, number: int, use: str) -> AIOKafkaConnection:
        """The connection to a node for one use, which nobody else's requests hold up. Raises one of `DRIVER_ERRORS`, or
        `BrokerClosed`."""
        connection = self._connections.get((number, use))
        if connection is not None and connection.connected():
            return connection
        async with self._locks[number, use]:
            connection = self._connections.get((number, use))
            if connection is not None and connection.connected():
                return connection
            return await self._connected(number, use)

    async def _connected(self, number: int, use: str) -> AIOKafkaConnection:
        self._check_open()
        address = self._addresses.get(number)
        if address is None:
            raise StaleMetadata(f"node {number} is not known (any more)")
        async with asyncio.timeout(self._settings.connect_timeout):
            connection = await create_conn(*address, max_idle_ms=_IDLE, **self._arguments)
        if self._closed:
            connection.close()
            self._check_open()
        self._connections[number, use] = connection
        return connection

    async def _somebody(self, use: str) -> AIOKafkaConnection:
        """A connection to any node: one that we have, or else to the first that answers; at last to one that the
        servers of the URL name."""
        known = [c for (_, each), c in self._connections.items() if each == use and c.connected()]
        if known:
            return random.choice(known)
        for number in random.sample(list(self._addresses), len(self._addresses)):
            try:
                return await self.connection(number, use)
            except DRIVER_ERRORS:
                continue
        await self.learn()
        return await self.connection(random.choice(list(self._addresses)), use)

    # -- requests

    @staticmethod
    async def sent(connection: AIOKafkaConnection, request: Any) -> Any:
        """The answer to one request, within `request_timeout`. Raises one of `DRIVER_ERRORS`."""
        try:
            return await connection.send(request)
        except TimeoutError:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise

    async def ask(self, request: Any, what: str, *, node: int | None = None, use: str = "asking") -> Any:
        """The answer of one node (None: of any) to a request, within `connect_timeout` and `request_timeout` together.

        Raises `BrokerError`.
        """
        try:
            async with asyncio.timeout(self._settings.connect_timeout + self._settings.request_timeout):
                connection = await (self._somebody(use) if node is None else self.connection(node, use))
                return await self.sent(connection, request)
        except DRIVER_ERRORS as error:
            raise translated(error, what) from error

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the connection to Kafka was closed")

    async def close(self) -> None:
        """Close every connection. Twice is once."""
        self._closed = True
        if self._learning is not None:
            await ended((self._learning,))
        ending = [connection.close(reason=CloseReason.SHUTDOWN) for connection in self._connections.values()]
        self._connections.clear()
        if ending:
            await asyncio.wait(ending, timeout=1.0)


async def diagnosed(error: BaseException, what: str, settings: Settings) -> BrokerError:
    """The error of streamfw for what starting one of aiokafka's clients raised: its own tells nothing of why, so the
    servers are asked once more. Raise it ``from error``."""
    found = translated(error, what)
    if not (found.transient and isinstance(error, KafkaConnectionError)):
        return found
    nodes = Nodes(settings)
    try:
        await nodes.learn()
    except BrokerError as really:
        return really
    finally:
        await nodes.close()
    return found
