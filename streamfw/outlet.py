"""Where what an app publishes on one broker goes out: encoded, checked, through the publish middleware.

Publish middleware is composed once, like the consuming kind:

    async def stamp(message: Outgoing, call_next: NextPublish) -> None:
        message.headers = message.headers.merged({"tenant": tenant.get()})
        await call_next(message)

    app = App(ship, publish_middleware=[stamp])

It sees what handlers and the app publish, replies and requests too; not the dead letters that the runtime puts aside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack

from .broker import REPLY_PREFIX, Capabilities, Connection, UnitOfWork
from .codec import Codec
from .config import near
from .errors import DecodeError, Rejected
from .message import (
    CONTENT_TYPE,
    CORRELATION_ID,
    NO_HEADERS,
    REPLY_TO,
    TOMBSTONE,
    Headers,
    HeaderValues,
    Outgoing,
    new_message_id,
)
from .middleware import compose

if TYPE_CHECKING:
    from .runtime.replies import Inbox

__all__ = ["TRANSACTION", "NextPublish", "Outlet", "PublishMiddleware", "PublishOptions", "outgoing", "send"]

R = TypeVar("R")
NextPublish: TypeAlias = Callable[[Outgoing], Awaitable[object]]
PublishMiddleware: TypeAlias = Callable[[Outgoing, NextPublish], Awaitable[object]]


class PublishOptions(TypedDict, total=False):
    """The options of a publish.

    - `key` orders it among its own; `headers` are text or bytes; `delay` is in seconds.
    - `message_id` is a UUIDv7 when none is given; `correlation_id` and `reply_to` travel as headers.
    - `priority`: a smaller one comes first.
    """

    key: str | None
    headers: HeaderValues | Headers | None
    delay: float
    message_id: str | None
    correlation_id: str | None
    reply_to: str | None
    priority: int


def outgoing(codec: Codec, name: str, payload: object, **options: Unpack[PublishOptions]) -> Outgoing:
    """Encode one message. Raises `Rejected` when the payload has no encoding; `ValueError` and `TypeError` on malformed
    options."""
    identity = options.get("message_id") or new_message_id()
    if not name or not isinstance(name, str):
        raise ValueError(f"the name to publish to is text and not empty, not {name!r}")
    if options:
        _check(options)
    body = _encoded(codec, name, payload, identity)
    given = options.get("headers")
    headers = NO_HEADERS if given is None else Headers(given)
    known = (
        (CONTENT_TYPE, codec.content_type),
        (CORRELATION_ID, options.get("correlation_id")),
        (REPLY_TO, options.get("reply_to")),
    )
    if more := {header: value for header, value in known if value is not None}:
        headers = headers.merged(more)
    return Outgoing(
        name=name,
        body=body,
        message_id=identity,
        key=options.get("key"),
        headers=headers,
        delay=options.get("delay", 0.0),
        priority=options.get("priority", 0),
    )


def _encoded(codec: Codec, name: str, payload: object, identity: str) -> bytes:
    try:
        return codec.encode(payload)
    except Exception as error:  # whatever a codec of somebody's own raises
        raise Rejected(f"the payload cannot be encoded: {error}", name=name, message_id=identity) from error


def _check(options: PublishOptions) -> None:
    """One pass, and `type(..) is` first: it is no call, and nearly always enough."""
    option: str
    value: object
    for option, value in options.items():
        if option in ("key", "message_id"):
            if value is not None and type(value) is not str and not isinstance(value, str):
                raise ValueError(f"{option}={value!r}: text, or None")
        elif option == "delay":
            if (type(value) is not float and not isinstance(value, int | float)) or not 0 <= value < 10**9:
                raise ValueError(f"delay={value!r}: seconds from now, zero or more")
        elif option == "priority":
            if type(value) is not int and not isinstance(value, int):
                raise ValueError(f"priority={value!r}: a whole number")
        elif option not in _KNOWN:
            raise TypeError(f"a publish has no option {option!r}{near(option, sorted(_KNOWN))}")


_KNOWN = frozenset(PublishOptions.__annotations__)


TRANSACTION: ContextVar[UnitOfWork] = ContextVar("streamfw_transaction")
"""The transaction that the handler runs in which publishes here, where transactions publish. A context variable,
because publishers are shared by all messages; it is only set around handlers of such transactions."""


async def send(connection: Connection | UnitOfWork, message: Outgoing) -> None:
    """Publish one message; raises what the broker answers for it."""
    answers = await connection.publish((message,))
    if answers and answers[0] is not None:
        raise answers[0]


class Outlet:
    """What publishes on one broker of an app. `connection` and `inbox` are there while the app runs. `published` counts
    what the broker accepted, `refused` what it did not."""

    def __init__(
        self,
        broker: str,
        codec: Codec,
        capabilities: Capabilities,
        middleware: Sequence[PublishMiddleware],
        connection: Callable[[str], Connection],
        inbox: Callable[[str], Inbox],
        around: Callable[[NextPublish], NextPublish] = lambda send: send,
    ) -> None:
        self.broker, self.codec, self._capabilities = broker, codec, capabilities
        self._connection, self._inbox = connection, inbox
        self._transactions = capabilities.publishing_transactions
        self._headers = NO_HEADERS if codec.content_type is None else Headers({CONTENT_TYPE: codec.content_type})
        self._decoders: dict[Any, Callable[[bytes], Any]] = {}
        self.published = self.refused = 0
        self.send: NextPublish = around(compose(self._send, middleware))

    async def _send(self, message: Outgoing) -> None:
        try:
            if message.priority and not self._capabilities.priorities:
                option = self._capabilities.priorities_option
                how = "" if option is None else f"; its option {option}= (brokers.{self.broker}.{option}) gives them"
                raise Rejected(
                    f"priority={message.priority}: broker {self.broker!r} has no priorities{how}",
                    name=message.name,
                    message_id=message.message_id,
                )
            if message.body is TOMBSTONE and not self._capabilities.tombstones:
                raise Rejected(
                    f"a tombstone: broker {self.broker!r} keeps no keys that it could delete",
                    name=message.name,
                    message_id=message.message_id,
                )
            connection = self._connection(self.broker)
            if self._transactions and (unit := TRANSACTION.get(None)) is not None and unit.belongs_to(connection):
                await send(unit, message)
            else:
                await send(connection, message)
        except Exception:
            self.refused += 1
            raise
        self.published += 1

    async def publish(self, name: str, payload: object, **options: Unpack[PublishOptions]) -> str:
        """Publish and return the message id, once the broker has accepted it. Raises a `PublishError`."""
        if options or type(name) is not str or not name:
            message = outgoing(self.codec, name, payload, **options)
        else:  # the same, for the publish that most are
            identity = new_message_id()
            body = _encoded(self.codec, name, payload, identity)
            message = Outgoing(name=name, body=body, message_id=identity, headers=self._headers)
        await self.send(message)
        return message.message_id

    async def request(
        self, name: str, payload: object, reply: type[R], timeout: float, **options: Unpack[PublishOptions]
    ) -> R:
        """Publish, and wait at most `timeout` seconds for the reply. Raises `ReplyTimeout`, a `PublishError`,
        `DecodeError` when the reply is something else, `Unsupported`."""
        self._connection(self.broker)
        decode = self._decoders.get(reply)
        if decode is None:
            decode = self._decoders[reply] = self.codec.decoder(reply)
        message = outgoing(self.codec, name, payload, **options)
        answer = await self._inbox(self.broker).ask(self.send, message, timeout, f"the request to {name!r}")
        try:
            value: R = decode(answer.body)
        except Exception as error:
            raise DecodeError(f"the reply to the request to {name!r} cannot be decoded: {error}"[:1024]) from error
        return value

    async def reply(self, address: str, value: object, headers: Headers) -> None:
        """Send a reply; an inbox that is gone keeps nothing."""
        message = outgoing(self.codec, address, value, headers=headers)
        message.kept = not address.startswith(REPLY_PREFIX)
        await self.send(message)
