"""Publishing: from a value to a message that a broker has accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .broker import Connection
from .codec import Codec
from .errors import NotRunning, Rejected
from .message import CONTENT_TYPE, CORRELATION_ID, NO_HEADERS, REPLY_TO, Headers, HeaderValues, Outgoing, new_message_id

__all__ = ["Publisher", "outgoing"]

T = TypeVar("T")
Target = tuple[Connection, Codec]


def outgoing(
    codec: Codec,
    name: str,
    payload: object,
    *,
    key: str | None = None,
    headers: HeaderValues | Headers | None = None,
    delay: float = 0.0,
    message_id: str | None = None,
    correlation_id: str | None = None,
    reply_to: str | None = None,
    priority: int = 0,
) -> Outgoing:
    """Encode one message. Raises `Rejected` when the payload has no encoding, `ValueError` on a malformed option,
    `TypeError` on a header that is neither text nor bytes."""
    identity = message_id or new_message_id()
    if not name or not isinstance(name, str):
        raise ValueError(f"the name to publish to is text and not empty, not {name!r}")
    # `type(..) is` first: it is no call, and nearly always enough.
    if (type(delay) is not float and not isinstance(delay, int | float)) or not 0 <= delay < 10**9:
        raise ValueError(f"delay={delay!r}: seconds from now, zero or more")
    if type(priority) is not int and not isinstance(priority, int):
        raise ValueError(f"priority={priority!r}: a whole number")
    if key is not None and type(key) is not str and not isinstance(key, str):
        raise ValueError(f"key={key!r}: text, or None")
    if type(identity) is not str and not isinstance(identity, str):
        raise ValueError(f"message_id={message_id!r}: text, or None")
    try:
        body = codec.encode(payload)
    except Exception as error:  # a cycle, a number beyond 64 bits, whatever a codec of somebody's own raises
        raise Rejected(f"the payload cannot be encoded: {error}", name=name, message_id=identity) from error
    all_headers = NO_HEADERS if headers is None else Headers(headers)
    known = ((CONTENT_TYPE, codec.content_type), (CORRELATION_ID, correlation_id), (REPLY_TO, reply_to))
    if more := {header: value for header, value in known if value is not None}:
        all_headers = all_headers.merged(more)
    return Outgoing(
        name=name, body=body, message_id=identity, key=key, headers=all_headers, delay=delay, priority=priority
    )


class Publisher(Generic[T]):
    """Publishes one type of payload to one name.

    As a parameter of a handler: ``receipts: Annotated[Publisher[Receipt], "receipts"]``. Or made anywhere and given to
    the app, ``receipts = Publisher[Receipt]("receipts"); app = App(ship, publishers=[receipts])``; `broker` is which of
    the app's brokers it goes to.
    """

    __slots__ = ("_target", "broker", "name")

    def __init__(self, name: str, *, broker: str = "default") -> None:
        self.name = name
        self.broker = broker
        self._target: Callable[[], Target] | None = None

    def bind(self, target: Callable[[], Target]) -> None:
        """Tell it where it publishes; the app does that at build."""
        self._target = target

    async def publish(
        self,
        payload: T,
        *,
        key: str | None = None,
        headers: HeaderValues | Headers | None = None,
        delay: float = 0.0,
        message_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        priority: int = 0,
    ) -> str:
        """Publish `payload` and return its message id once the broker has accepted it.

        `key` orders it among its own; `delay` is in seconds; `message_id` is a UUIDv7 when none is given; a smaller
        `priority` comes first. Concurrent publishes go together. Raises a `PublishError`, or `NotRunning`; `ValueError`
        and `TypeError` on malformed options.
        """
        if self._target is None:
            raise NotRunning(f"publisher of {self.name!r} belongs to no app: App(.., publishers=[it])")
        connection, codec = self._target()
        message = outgoing(
            codec,
            self.name,
            payload,
            key=key,
            headers=headers,
            delay=delay,
            message_id=message_id,
            correlation_id=correlation_id,
            reply_to=reply_to,
            priority=priority,
        )
        await send(connection, message)
        return message.message_id

    def __repr__(self) -> str:
        return f"Publisher({self.name!r}, broker={self.broker!r})"


async def send(connection: Connection, message: Outgoing) -> None:
    """Publish one message; raises what the broker answers for it."""
    answers: Any = await connection.publish((message,))
    if answers and answers[0] is not None:
        raise answers[0]
