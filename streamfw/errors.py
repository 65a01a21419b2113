"""Every error that streamfw raises on purpose.

    StreamError
    ├── ConfigError              a key of the configuration, named by its path
    ├── BuildError               one mistake that `App.build()` found; they come together in an ExceptionGroup
    ├── NotRunning               the app, or what hangs on it, is used while it does not run
    ├── Unsupported              the broker has no such thing, and says so instead of pretending
    ├── ReplyTimeout             nobody answered a request in time (also a TimeoutError)
    ├── BrokerError              the connection or what it opened
    │   ├── BrokerUnavailable    transient: the runtime tries again
    │   ├── BrokerRefused        terminal: credentials, a missing table, a version; the app stops
    │   └── BrokerClosed         a handle that was kept past its connection
    ├── PublishError             one message was not accepted (answered for each message)
    │   ├── Unroutable           nobody would ever get it
    │   ├── Rejected             the broker cannot take this message as it is
    │   │   └── TooLarge
    │   ├── Blocked              the broker takes nothing now, or a queue does not
    │   ├── Unavailable          it was surely not stored: the broker could not be reached
    │   └── OutcomeUnknown       it may be stored: publish again with the same message id
    ├── SettleError              one settlement changed nothing (answered for each delivery)
    │   ├── LeaseLost
    │   ├── StaleDelivery        of a channel that is gone
    │   └── PartitionRevoked
    ├── MessageError             a message that never reaches its handler
    │   ├── DecodeError
    │   └── ArgumentError        a header or another argument of the handler
    ├── PartialFailure           raised by a batch handler: these elements failed
    └── WorkerDied               the process that a handler ran in ended (run_in="process")

Messages of errors never hold a password: URLs are shown by `redact`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from .texts import one_line

if TYPE_CHECKING:
    from .broker import Delivery

__all__ = [
    "ArgumentError",
    "Blocked",
    "BrokerClosed",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "BuildError",
    "ConfigError",
    "DecodeError",
    "LeaseLost",
    "MessageError",
    "NotRunning",
    "OutcomeUnknown",
    "PartialFailure",
    "PartitionRevoked",
    "PublishError",
    "Rejected",
    "ReplyTimeout",
    "SettleError",
    "StaleDelivery",
    "StreamError",
    "TooLarge",
    "Unavailable",
    "Unroutable",
    "Unsupported",
    "WorkerDied",
    "redact",
]


class StreamError(Exception):
    """Root of what streamfw raises: what happened, where, and what to do about it."""


class ConfigError(StreamError):
    """A wrong key or value in the configuration.

    `path` is the key's path as it stands in ``streamfw.toml``, for example ``brokers.default.url``.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class BuildError(StreamError):
    """One mistake in the application, found by `App.build()` before anything ran.

    `where` names the subscriber, publisher or broker it stands at.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class NotRunning(StreamError):
    """The app does not run (yet, or any more)."""


class Unsupported(StreamError):
    """The broker does not have this; nothing was done."""


class ReplyTimeout(StreamError, TimeoutError):
    """A request was not answered within its deadline. It may have been handled; a late answer is counted, not kept."""


class BrokerError(StreamError):
    """A connection, or a source that it opened, failed.

    `transient` says whether trying again can help; the runtime reopens a source on a transient error and
    stops the app on another.
    """

    transient: ClassVar[bool] = False


class BrokerUnavailable(BrokerError):
    """The server cannot be reached, or cut the connection; trying again can help."""

    transient = True


class BrokerRefused(BrokerError):
    """The server answered, and the answer will not change by itself."""


class BrokerClosed(BrokerError):
    """The connection was closed; its handles do nothing any more."""


class PublishError(StreamError):
    """The broker did not accept one message. `name` is where it was to go, `message_id` which one it was."""

    def __init__(self, message: str, *, name: str = "", message_id: str = "") -> None:
        where = f" (message {one_line(message_id)} to {name!r})" if message_id else ""
        super().__init__(message + where)
        self.name = name
        self.message_id = message_id


class Unroutable(PublishError):
    """No queue would take it; the broker keeps nothing for those who come after."""


class Rejected(PublishError):
    """The broker can never take this message as it is."""


class TooLarge(Rejected):
    """It is larger than the broker's limit. `headers_over`: with so many bytes less of headers it may pass; 0: its body
    alone is too large."""

    def __init__(self, message: str, *, name: str = "", message_id: str = "", headers_over: int = 0) -> None:
        super().__init__(message, name=name, message_id=message_id)
        self.headers_over = headers_over


class Blocked(PublishError):
    """The broker takes no messages at present (an alarm, a full queue); it was not stored. Where the name leads to
    several queues and one of them is full, the others may have it."""


class Unavailable(PublishError):
    """The broker could not be reached; the message was surely not stored."""


class OutcomeUnknown(PublishError):
    """The connection broke between sending and the answer: it may be stored.

    Publish again with the same ``message_id``; an inbox at the consumer folds the two.
    """


class SettleError(StreamError):
    """A settlement changed nothing, because the delivery is not ours any more; somebody else gets it."""

    def __init__(self, delivery: Delivery, message: str) -> None:
        identity = one_line(delivery.message_id)
        super().__init__(f"{message} (message {identity} of {delivery.name!r}, attempt {delivery.attempt})")
        self.delivery = delivery


class LeaseLost(SettleError):
    """The lease ended before the settlement came, and the message was, or will be, delivered again."""


class StaleDelivery(SettleError):
    """The delivery belongs to a channel or connection that is gone."""


class PartitionRevoked(SettleError):
    """The partition moved to another member of the consumer group."""


class MessageError(StreamError):
    """The message cannot be given to its handler; it goes to the dead letter with its raw bytes."""


class DecodeError(MessageError):
    """The body is not what the handler's annotation says."""


class ArgumentError(MessageError):
    """An argument of the handler besides the body (a header, for example) is missing or malformed."""


class PartialFailure(StreamError):
    """Raise it in a batch handler to fail some elements: ``PartialFailure({index: error})``.

    The elements named are settled by the failure policy under their error; all others are acknowledged.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"{len(errors)} elements of the batch failed: {dict(list(errors.items())[:3])!r}")
        self.errors = dict(errors)

    def __reduce__(self) -> tuple[object, ...]:
        return PartialFailure, (self.errors,)


class WorkerDied(StreamError):
    """The process that a handler ran in (``run_in="process"``) ended before the handler did: killed by somebody or by
    the kernel (out of memory), or crashed. It counts as a failure of the message that was in it."""


def redact(url: str) -> str:
    """Return `url` without password and query (which may hold one): what errors and descriptions show.

    A password that should have been percent-encoded ends nowhere that a parser would see ("/", "#" and "?" end the
    part it stands in), so it is taken to reach up to the last "@"; and of ``name:word``, without any, only a number is
    a port.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    plain = _without_query(rest)
    if "@" not in plain and not _QUERY.match(rest, len(plain)):
        plain = rest
    login, at, place = plain.rpartition("@")
    place = _without_query(place)
    hosts, slash, path = place.partition("/")
    if not all(_PORTED.fullmatch(host) for host in hosts.split(",")):
        hosts, slash, path = hosts.partition(":")[0], "", ""
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{hosts}{slash}{path}"


_QUERY = re.compile(r"\?[a-zA-Z_]+=")
_PORTED = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


def _without_query(url: str) -> str:
    return re.split("[?#]", url, maxsplit=1)[0]
