"""Connections to RabbitMQ, supervised by us: each one is an *epoch*, and what follows a lost one is another.

Theory of operation
    `Epochs` keeps one connection up from `start` to `close`. A task of its own connects, waits until the connection
    ends, tells who listens, and connects again. Nothing is restored by it: who used the lost epoch hears of it
    (`Channel.on_closed`, or a listener here), asks `connected` for the next one, and builds what it needs on it, in its
    own order.

    It waits between attempts, at random up to a fifth of the time that the outage has lasted (and at least
    `backoff[0]`, at most `backoff[1]` seconds). So a server that was away briefly is found at once, one that is away
    for long is not pestered, and many clients do not come all at the same moment. Several hosts are tried in turn.

    It gives up on what only a person can change (`BrokerRefused`): wrong credentials, a vhost that does not exist or
    is not ours, a certificate that does not verify. `connected` raises that from then on.

    A peer that neither answers nor closes is found by its heartbeats (`ConnectionOptions.heartbeat`): nothing at all
    for twice that time is an end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote

import aiormq
from aiormq.exceptions import AuthenticationError, IncompatibleProtocolError
from yarl import URL

from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, BrokerUnavailable

from ._base import told
from ._epoch import Epoch
from ._gets import GettingChannel
from ._quiet import QuietConnection
from ._transport import SocketFactory
from .channel import Channel, Closed
from .errors import DRIVER_ERRORS, AccessRefused, closing_error, translated
from .fastlane import FastEpoch, LaneFactory, is_available
from .library import LibraryEpoch

__all__ = ["ConnectionOptions", "Epoch", "Epochs", "Listener"]

log = logging.getLogger("streamfw.rabbit")

Listener: TypeAlias = "Callable[[Epoch | None, Closed | None], None]"
"""Called with an epoch that is up, or with None and why the last one ended."""

# An epoch that lived shorter than this counts as part of the outage before it.
_STABLE: Final = 1.0
# The share of an outage that is waited for at most until the next attempt.
_SHARE: Final = 0.2
# Seconds without a connection after which that is told again, and then after twice as many.
_TOLD: Final = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to reach the server.

    - `hosts`: (name, port) pairs, tried in turn.
    - `tls`: a context for TLS; None: plain TCP. `auth`: ``external`` takes the user from the client's certificate.
    - `name`: how the connection is called in the server's management.
    - `heartbeat`: in seconds, 0 for none; `timeout`: for a connection to be up, and for a channel, in seconds.
    - `backoff`: the shortest and the longest bound of the pause between attempts, in seconds.
    - `transport`: ``fast`` takes what is many past aiormq, ``aiormq`` goes through it, and ``auto`` is the fast one as
      long as it can be.
    """

    hosts: Sequence[tuple[str, int]] = (("localhost", 5672),)
    user: str = "guest"
    password: str = dataclasses.field(default="guest", repr=False)
    vhost: str = "/"
    tls: ssl.SSLContext | None = None
    auth: Literal["plain", "external"] = "plain"
    name: str = "streamfw"
    heartbeat: int = 15
    timeout: float = 10.0
    backoff: tuple[float, float] = (0.2, 30.0)
    transport: Literal["auto", "aiormq", "fast"] = "auto"

    def url(self, host: str, port: int) -> URL:
        """For aiormq. It holds the password: not to be shown."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"
        place = f"[{host}]" if ":" in host else host
        scheme = "amqps" if self.tls is not None else "amqp"
        options = f"heartbeat={self.heartbeat}&auth={self.auth}"
        return URL(f"{scheme}://{login}@{place}:{port}/{quote(self.vhost, safe='')}?{options}", encoded=True)


class Epochs:
    """One connection, kept up. See the head of this module."""

    def __init__(self, options: ConnectionOptions) -> None:
        if not options.hosts:
            raise ValueError("hosts: none is given")
        self.options = options
        self.refused: BrokerRefused | None = None
        """What ended it for good."""
        self.connects = 0
        """How many connections were made so far."""
        self.last_error: BrokerError | None = None
        """Why the last attempt, or the last epoch, ended; None while one is up."""
        self.blocked_changed: Callable[[bool, str], None] | None = None
        """Called when the server blocks publishers, and when it does no longer, with its reason."""
        self._current: Epoch | None = None
        self._listeners: list[Listener] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._closed = False
        self._changed: asyncio.Future[None] | None = None
        self._down = 0.0  # seconds without a connection, in this outage
        self._told = 0.0  # of them, when to tell again
        self._host = 0
        self._disposing: set[asyncio.Task[None]] = set()
        self._fast = options.transport == "fast" or (options.transport == "auto" and is_available())

    # Using it

    def start(self) -> None:
        """Begin to connect, in a task of its own."""
        if self._supervisor is None and not self._closed:
            self._supervisor = asyncio.create_task(self._supervise(), name=f"streamfw rabbit {self.options.name}")

    @property
    def current(self) -> Epoch | None:
        """The connection that is up; None between two."""
        epoch = self._current
        return epoch if epoch is not None and epoch.closed is None else None

    async def connected(self, timeout: float) -> Epoch:
        """The current epoch, or the next one, waited for up to `timeout` seconds.

        Raises `BrokerRefused` when there will be none, `BrokerUnavailable` with the last reason when the time is over,
        `BrokerClosed` after `close`.
        """
        try:
            async with asyncio.timeout(timeout):
                while (epoch := self.current) is None:
                    self._check()
                    if self._changed is None:
                        self._changed = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._changed)
        except TimeoutError:
            raise BrokerUnavailable(f"not connected within {timeout:g} s: {self.describe()}") from self.last_error
        return epoch

    def _check(self) -> None:
        if self._closed:
            raise BrokerClosed("the connection to RabbitMQ was closed")
        if self.refused is not None:
            raise type(self.refused)(str(self.refused)) from self.refused

    async def channel(self, *, confirms: bool = False) -> Channel:
        """A channel of the current epoch; with `confirms` one to publish on. Waits as `ConnectionOptions.timeout`
        says, for the connection and for the channel. Raises as `connected`."""
        epoch = await self.connected(self.options.timeout)
        return await epoch.channel(confirms=confirms, timeout=self.options.timeout)

    @asynccontextmanager
    async def declarations(self, doing: str = "declaring") -> AsyncIterator[GettingChannel]:
        """A channel of the library to be thrown away, on the current epoch: for declarations, whose refusal closes it.
        What the server refuses is raised as in `errors`; `doing` says what, for the message."""
        epoch = await self.connected(self.options.timeout)
        async with epoch.declarations(doing) as channel:
            yield channel

    @asynccontextmanager
    async def apart(self, doing: str = "declaring") -> AsyncIterator[GettingChannel]:
        """The same on a connection of its own, for what a server may answer by closing the *connection* (503 and 540,
        or 541 for what it permits no more)."""
        self._check()
        epoch = await _connect(dataclasses.replace(self.options, transport="aiormq"), self._where(), 0, False)
        try:
            async with epoch.declarations(doing) as channel:
                yield channel
        finally:
            await epoch.close()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called whenever an epoch begins or ends; what is returned ends that."""
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    @property
    def blocked_since(self) -> float | None:
        """By the loop's clock, since when the server takes no publishes; None: it does, or nobody is connected."""
        epoch = self.current
        return epoch.blocked_since if epoch is not None else None

    def describe(self) -> str:
        """In one line, how it is. No credentials in it."""
        epoch = self.current
        if epoch is not None:
            blocked = f", publishing is blocked: {epoch.blocked_text}" if epoch.blocked_since is not None else ""
            return f"connected to {epoch.where}{blocked}"
        if self._closed:
            return "closed"
        if self.refused is not None:
            return str(self.refused)
        if self.last_error is not None:
            return str(self.last_error)
        return f"connecting to {self._where()[0]}:{self._where()[1]}"

    async def close(self) -> None:
        """Close it for good: channels first, so that no settlement is lost. Never raises; a few seconds at most."""
        self._closed = True
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await ended((supervisor,))
        epoch, self._current = self._current, None
        if epoch is not None:
            self._dispose(epoch)
        if self._disposing:
            await asyncio.wait(set(self._disposing))
        self._wake()

    # Supervising

    async def _supervise(self) -> None:
        try:
            await self._keep_up()
        except Exception as error:
            # A mistake of ours; nobody may wait for a connection that nobody makes.
            log.exception("supervising RabbitMQ connection %r failed", self.options.name)
            self.refused = BrokerRefused(f"supervising the connection failed: {error!r}")
            self._tell(None, None)

    async def _keep_up(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                epoch = await self._next()
            except BrokerRefused as error:
                self.refused = error
                self._tell(None, None)
                return
            except BrokerError as error:
                if self._closed:  # aiormq has swallowed the cancellation
                    return
                self._note_failure(error)
                await asyncio.sleep(self._pause())
                self._down += loop.time() - began
                continue
            began = loop.time()
            self._up(epoch)
            closed = await asyncio.shield(epoch.ended)
            self._current = None
            if loop.time() - began > _STABLE:
                self._down = 0.0
            self.last_error = BrokerUnavailable(f"{epoch.where}: {closed}")
            log.warning("RabbitMQ connection %r ended: %s", self.options.name, closed)
            self._tell(None, closed)
            self._note(epoch, closed)
            self._dispose(epoch)

    async def _next(self) -> Epoch:
        where = self._where()
        self._host += 1
        try:
            return await _connect(self.options, where, self.connects + 1, self._fast)
        except (BrokerError, asyncio.CancelledError):
            raise
        except Exception as error:
            # Not what connecting raises: the lane itself does not get along with this aiormq, or this loop.
            if not self._fast or self.options.transport == "fast":
                raise BrokerRefused(f"connecting to {where[0]}:{where[1]}: {error!r}") from error
            self._fast = False
            raise BrokerUnavailable(f"the fast lane does not work here, going on without: {error!r}") from error

    def _note_failure(self, error: BrokerError) -> None:
        """An outage that lasts is told ever more rarely: whoever asks gets `describe`."""
        self.last_error = error
        if self._down >= self._told:
            self._told = max(_TOLD, 2 * self._down)
            # Before the first connection whoever waits for it is told, and tells.
            level = logging.WARNING if self.connects else logging.DEBUG
            log.log(level, "RabbitMQ connection %r is down for %.0f s: %s", self.options.name, self._down, error)

    def _where(self) -> tuple[str, int]:
        return self.options.hosts[self._host % len(self.options.hosts)]

    def _pause(self) -> float:
        """Seconds until the next attempt. The first host of the list to be tried again is worth no wait of its own."""
        least, most = self.options.backoff
        return random.uniform(0, min(most, max(least, self._down * _SHARE)))

    def _up(self, epoch: Epoch) -> None:
        self.connects += 1
        self._current = epoch
        if self.connects > 1:
            log.info("RabbitMQ connection %r is up again: %s", self.options.name, epoch.where)
        self.last_error = None
        self._told = 0.0
        self._host -= 1  # this one, first, when it comes to that
        epoch.on_blocked = self._blocked
        self._tell(epoch, None)

    def _blocked(self, blocked: bool, text: str) -> None:
        log.log(
            logging.WARNING if blocked else logging.INFO,
            "RabbitMQ %s publishers on connection %r%s",
            "blocks" if blocked else "no longer blocks",
            self.options.name,
            f": {text}" if text else "",
        )
        told(self.blocked_changed, blocked, text)

    def _note(self, epoch: Epoch, closed: Closed) -> None:
        if epoch.damaged and self.options.transport == "auto":
            log.error("the fast lane is given up on for connection %r: %s", self.options.name, closed)
            self._fast = False

    def _dispose(self, epoch: Epoch) -> None:
        """Clean up behind a lost epoch, without holding up the next one."""
        disposing = asyncio.create_task(epoch.close())
        self._disposing.add(disposing)
        disposing.add_done_callback(self._disposing.discard)

    def _tell(self, epoch: Epoch | None, closed: Closed | None) -> None:
        self._wake()
        for listener in list(self._listeners):
            told(listener, epoch, closed)

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


async def _connect(options: ConnectionOptions, where: tuple[str, int], number: int, fast: bool) -> Epoch:
    host, port = where
    place = f"{host}:{port}"
    factory = LaneFactory() if fast else SocketFactory()
    # Its own properties stay: with "capabilities" among these the server would not tell of blocking, and of cancels.
    named: dict[str, Any] = {"connection_name": options.name, "product": "streamfw"}
    library = QuietConnection(options.url(host, port), transport_factory=factory, client_properties=named)
    kind = FastEpoch if fast else LibraryEpoch
    try:
        async with asyncio.timeout(options.timeout):
            await _open(factory, host, port, options.tls)
            await library.connect()
        return kind(library, factory, number=number, where=place, heartbeat=options.heartbeat)
    except BaseException as error:
        await _give_up(library, factory)
        if isinstance(error, BrokerError):
            raise
        if isinstance(error, TimeoutError):
            raise BrokerUnavailable(f"{place} did not answer within {options.timeout:g} s") from error
        if isinstance(error, DRIVER_ERRORS):
            raise _handshake_error(error, factory, place) from error
        raise


async def _give_up(library: aiormq.Connection, factory: SocketFactory) -> None:
    """Leave nothing behind of a connection that was not made."""
    if factory.protocol is not None:
        factory.protocol.abort()
    await asyncio.wait({asyncio.create_task(library.close())}, timeout=1.0)


async def _open(factory: SocketFactory, host: str, port: int, tls: ssl.SSLContext | None) -> None:
    doing = f"connecting to {host}:{port}"
    try:
        await factory.open(host, port, tls)
    except ssl.SSLCertVerificationError as error:
        raise BrokerRefused(f"{doing}: its certificate does not verify: {error.verify_message}") from error
    except OSError as error:
        raise BrokerUnavailable(f"{doing}: {error.strerror or error}") from error


def _handshake_error(error: BaseException, factory: SocketFactory, place: str) -> BrokerError:
    doing = f"connecting to {place}"
    told_by_server = factory.protocol.refusal if factory.protocol is not None else None
    if told_by_server is not None:
        return closing_error(Closed("connection", *told_by_server), doing)
    if isinstance(error, AuthenticationError):
        return AccessRefused(f"{doing}: the server does not offer this way to authenticate")
    if isinstance(error, IncompatibleProtocolError):
        return BrokerRefused(f"{doing}: the server does not speak AMQP 0-9-1")
    return translated(error, doing)
