"""Offsets of streams in the streams themselves, where other clients of RabbitMQ keep theirs; over the stream protocol.

Theory of operation
    A consumer's offset is a record in the stream's own log, under a name: ours is the group. It is that of the last
    message which is done, so one below ours. Nothing done at all is -1, in two's complement, as other clients read it.

    The protocol does not answer a store. But the query behind it on the same connection is answered by the same process
    of the server, in order: what it returns has been stored. A store on a connection that is gone does nothing, in
    silence; then the query is not answered, and that is how it shows.

    The server knows no owner of an offset, and fences nobody. So before each store we look whether what is there is
    ours: if it is not, somebody else has read on meanwhile. Between that look and the store nothing but the reader's
    lock keeps others off; what comes of it is a repetition.

    rstream's `Client` is the connection itself, without recovery: what has failed once is thrown away. One that was
    lost it does not close, so that is done here; and who asks it then, or waits for its answer, would wait in vain, so
    we ask it before, and have it tell us.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from streamfw.ending import ended
from streamfw.errors import BrokerClosed, BrokerError, BrokerRefused, BrokerUnavailable, redact

from .offsets import Bookmark, OffsetStore, Place

if TYPE_CHECKING:
    from rstream.client import Client

__all__ = ["ServerOffsets"]

log = logging.getLogger("streamfw.rabbit")

_T = TypeVar("_T")
_PLAIN, _TLS = "rabbitmq-stream", "rabbitmq-stream+tls"
_PORTS: Final = {_PLAIN: 5552, _TLS: 5551}
_FRAME: Final = 1024 * 1024
_HEARTBEAT: Final = 15
_LONGEST: Final = 255  # bytes of a consumer's name
_WRAP: Final = 2**64


class ServerOffsets(OffsetStore):
    """In the stream's own log, for the consumer named as the group. Needs ``pip install streamfw[rabbit-stream]`` and
    the server's stream plugin.

    The server forgets an offset whose message it has dropped (`Stream.max_age`, `Stream.max_length_bytes`); the group
    begins at `Stream.offset` then, so that should be ``first``. With a stream that is deleted go its offsets, so
    one that is made anew is read as a new one. Each store is a record in the stream, and takes an offset.

    - `url`: ``rabbitmq-stream://user:password@host:port`` (port 5552), or ``rabbitmq-stream+tls://`` (port 5551).
    - `ca`: a file in PEM with certificates to trust (default: the system's).
    - `timeout`: seconds for an answer.

    Raises `ValueError` for a URL that is none.
    """

    def __init__(self, url: str, *, ca: str | None = None, timeout: float = 5.0) -> None:
        self.url, self.ca, self.timeout = url, ca, timeout
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is None or parts.password is None:
            raise ValueError("ServerOffsets: rabbitmq-stream://user:password@host:port is needed")
        self.host, self.port = parts.hostname, port or _PORTS[parts.scheme]
        self.tls = parts.scheme == _TLS
        self.username, self.password = unquote(parts.username), unquote(parts.password)
        self.vhost = unquote(parts.path[1:]) if len(parts.path) > 1 else None

    def open(self, place: Place) -> Bookmark:
        """See `OffsetStore.open`."""
        return _InStream(self, place)

    def __repr__(self) -> str:
        return f"ServerOffsets({redact(self.url)!r})"


class _InStream(Bookmark):
    def __init__(self, offsets: ServerOffsets, place: Place) -> None:
        self._offsets, self._place = offsets, place
        self._client: Client | None = None
        self._lost: asyncio.Future[None] | None = None  # when the present client's connection ends
        self._ours: set[int | None] = set()  # what is there may be of us; several, while it is not known what arrived
        self._closed = False

    async def take(self) -> int | None:
        found = await self._do(self._queried())
        self._ours = {found}
        return None if found is None else (found + 1) % _WRAP

    async def is_ours(self) -> bool:
        return await self._do(self._queried()) in self._ours

    async def store(self, offset: int) -> bool:
        if not await self.is_ours():
            return False
        done = (offset - 1) % _WRAP
        self._ours.add(done)
        found = await self._do(self._stored(done))
        if found != done:
            raise BrokerUnavailable(
                f"{self._offsets!r}: {offset - 1} was stored for {self._place.group!r} in {self._place.stream!r}, and "
                f"{found} is there: does somebody else store under this name?"
            )
        self._ours = {done}
        return True

    async def _stored(self, done: int) -> int | None:
        client = await self._connected()
        await client.store_offset(self._place.stream, self._place.group, done)
        return await self._queried()

    async def _queried(self) -> int | None:
        client = await self._connected()
        try:
            return await client.query_offset(self._place.stream, self._place.group)
        except _driver().OffsetNotFound:
            return None

    async def _do(self, work: Awaitable[_T]) -> _T:
        """In time, or on no connection that is used again. Raises a `BrokerError`."""
        lost = self._lost = asyncio.get_running_loop().create_future()
        whole = asyncio.ensure_future(work)
        try:
            waiting = {whole, lost}
            await asyncio.wait(waiting, timeout=self._offsets.timeout, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done() and lost.done():
                raise BrokerUnavailable(f"{self._offsets!r}: the connection was lost")
            if not whole.done():
                raise BrokerUnavailable(f"{self._offsets!r}: no answer for {self._offsets.timeout:g} s")
            return whole.result()
        except BaseException as error:
            await ended((whole,))
            await self._drop()
            if isinstance(error, BrokerError) or not isinstance(error, Exception):
                raise
            raise self._translated(error) from error

    async def _connected(self) -> Client:
        if self._closed:
            raise BrokerClosed("this bookmark was closed")
        if self._client is not None and not self._client.is_connection_alive():
            await self._drop()
        if self._client is None:
            self._check()
            self._client = client = self._made()
            await client.start()
            offsets = self._offsets
            await client.authenticate(self._place.vhost, offsets.username, offsets.password)
        return self._client

    def _check(self) -> None:
        offsets, place = self._offsets, self._place
        if len(place.group.encode()) > _LONGEST:
            raise BrokerRefused(f"{offsets!r}: group {place.group[:40]!r}..: at most {_LONGEST} bytes are needed")
        if offsets.vhost not in (None, place.vhost):
            raise BrokerRefused(f"{offsets!r}: the vhost of the stream is {place.vhost!r}")

    def _made(self) -> Client:
        offsets = self._offsets
        client: Client

        def closed(_: object) -> None:
            if self._client is client and self._lost is not None and not self._lost.done():
                self._lost.set_result(None)

        client = _driver().client.Client(
            offsets.host,
            offsets.port,
            ssl_context=ssl.create_default_context(cafile=offsets.ca) if offsets.tls else None,
            frame_max=_FRAME,
            heartbeat=_HEARTBEAT,
            connection_name="streamfw stream offsets",
            connection_closed_handler=closed,
        )
        client.add_stream(self._place.stream)  # else it is not told
        return client

    def _translated(self, error: Exception) -> BrokerError:
        text = f"{self._offsets!r}: {type(error).__name__}: {error}".rstrip(": ")
        # Credentials, a vhost, a permission: nothing that passes. A stream that is not there may come.
        if getattr(error, "code", None) in _REFUSED or isinstance(error, ssl.SSLCertVerificationError):
            return BrokerRefused(text)
        return BrokerUnavailable(text)

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        socket: Any = client._conn
        for close in (client.close, *([socket.close] if socket is not None else [])):
            try:
                await close()
            except Exception as error:  # it is lost, or was not there yet
                log.debug("%r: closing: %r", self._offsets, error)

    async def close(self) -> None:
        self._closed = True
        await self._drop()


_REFUSED: Final = frozenset({8, 9, 11, 12, 16})
"""The protocol's codes for authentication, the loopback rule, the vhost, and a permission."""


def _driver() -> Any:
    try:
        import rstream.client
    except ImportError as error:
        raise BrokerRefused(f"ServerOffsets: install streamfw[rabbit-stream]: {error}") from error
    return rstream
