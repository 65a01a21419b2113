"""What RabbitMQ's answers mean, in the errors of `streamfw.errors`.

    BrokerUnavailable        transient
    └── ChannelGone          the channel (or its connection) ended under a call; `closed` says why
    BrokerRefused            terminal
    ├── AccessRefused        403, 530: credentials, a missing vhost, a missing permission
    ├── NotFound             404: an exchange or queue that is not there
    └── PreconditionFailed   406, 541 of a deprecated feature: the server declines it as asked
        └── TopologyMismatch   it exists, with other arguments

Which codes are terminal follows from what a later try could change: as the answer to a call or a handshake, 403, 404,
406 and 530 stay as they are until a person acts. 320 (the server shuts down, or an operator closes the connection), a
lost socket, 405 (the previous owner of an exclusive queue is still there) and everything else may pass. The end of a
channel that was in use is always transient: what opens the next one finds out what is terminal. So is 541, but for
features that the server does not permit any more, which say so.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

import aiormq.exceptions as driver

from streamfw.errors import BrokerError, BrokerRefused, BrokerUnavailable

from .channel import Closed

__all__ = [
    "DRIVER_ERRORS",
    "LIBRARY_ERRORS",
    "AccessRefused",
    "ChannelGone",
    "NotFound",
    "PreconditionFailed",
    "TopologyMismatch",
    "closing_error",
    "is_fatal",
    "reason",
    "translated",
]

LIBRARY_ERRORS: Final = (driver.AMQPError, driver.ChannelInvalidStateError)
"""aiormq's own."""
DRIVER_ERRORS: Final = (
    *LIBRARY_ERRORS,
    OSError,
    EOFError,
    asyncio.TimeoutError,
    RuntimeError,  # "Connection ... closed", of a call that came too late
    asyncio.InvalidStateError,
)
"""What its calls raise, with what it lets through from the socket."""

_CODES: Final[dict[type[BaseException], int]] = {
    driver.ConnectionFrameError: 501,
    driver.ConnectionSyntaxError: 502,
    driver.ConnectionCommandInvalid: 503,
    driver.ConnectionChannelError: 504,
    driver.ConnectionUnexpectedFrame: 505,
    driver.ConnectionResourceError: 506,
    driver.ConnectionNotAllowed: 530,
    driver.ConnectionNotImplemented: 540,
    driver.ConnectionInternalError: 541,
    driver.ProbableAuthenticationError: 403,
    driver.ChannelAccessRefused: 403,
    driver.ChannelNotFoundEntity: 404,
    driver.ChannelLockedResource: 405,
    driver.ChannelPreconditionFailed: 406,
}
# What passes under one of those codes: a durable queue whose node is away (404), a consumer that has its queue for
# itself (403), a limit of connections (530).
_PASSING: Final = re.compile(
    "down or inaccessible|stopped by supervisor|is down|timeout|exclusive use|limit", re.IGNORECASE
)
# What is permitted no more ends the whole connection (seen on 4.0 and 4.3).
_DENIED: Final = re.compile(r"INTERNAL_ERROR - Feature `\w+` is deprecated")
_QUOTED: Final = re.compile("'[^']*'")
_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<kind>queue|exchange) '(?P<name>.*)' in vhost '.*': "
    r"received (?P<declared>.*) but current is (?P<actual>.*)"
)


_WAYS_OUT: Final = {
    "x-dead-letter-exchange": "It is what dead_letter= of the subscriber says",
    "x-single-active-consumer": "It is what ordered_by= of the subscriber, or single_active=, says",
}


class ChannelGone(BrokerUnavailable):
    """The channel or its connection ended; `closed` says why. Whoever goes on needs a new channel."""

    def __init__(self, closed: Closed, doing: str = "") -> None:
        super().__init__(f"{doing}: {closed}" if doing else str(closed))
        self.closed = closed


class AccessRefused(BrokerRefused):
    """Wrong credentials, a vhost that does not exist or is not ours, or a permission that the user lacks."""


class NotFound(BrokerRefused):
    """The exchange or queue does not exist."""


class PreconditionFailed(BrokerRefused):
    """The server declines what was asked, as it was asked."""


class TopologyMismatch(PreconditionFailed):
    """The queue (or exchange) exists with another value of `argument` than we declare; nothing was changed.

    `declared` is what we asked for and `actual` what it has, both in the server's words. Declare what it has, or leave
    declarations off. (Or delete it, with the messages in it.)
    """

    def __init__(self, queue: str, argument: str, declared: str, actual: str, kind: str = "queue") -> None:
        super().__init__(
            f"{kind} {queue!r} exists with other properties: {argument} is {actual}, declared was {declared}. "
            f"Nothing was changed. {_WAYS_OUT.get(argument, 'Declare what it has')}; or declare nothing of what is "
            f"there already: declare='passive' (or 'off')"
        )
        self.queue = queue
        self.argument = argument
        self.declared = declared
        self.actual = actual


def is_fatal(closed: Closed) -> bool:
    """Whether the answer to a call or a handshake will stay the same until a person acts."""
    said = _QUOTED.sub("", closed.text)  # a queue may be called "timeout", and an argument "x-delivery-limit"
    return _is_denied(closed) or (closed.code in (403, 404, 406, 530) and not _PASSING.search(said))


def _is_denied(closed: Closed) -> bool:
    return closed.code == 541 and _DENIED.match(closed.text) is not None


def closing_error(closed: Closed, doing: str) -> BrokerError:
    """The error of a call that was answered by a close. `doing` says which call, for the message."""
    if not is_fatal(closed):
        return ChannelGone(closed, doing)
    told = f"{doing}: {closed}"
    if closed.code == 404:
        return NotFound(told)
    if closed.code in (403, 530):
        return AccessRefused(told)
    found = _INEQUIVALENT.search(closed.text)
    if found is None:
        return PreconditionFailed(told)
    return TopologyMismatch(found["name"], found["argument"], found["declared"], found["actual"], found["kind"])


def reason(error: BaseException | None) -> Closed:
    """What an exception of the library says about an end: its code and text where the server gave any."""
    if error is None:
        return Closed("local")
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 0)
    text = str(error.args[0]) if error.args else ""
    if not code and isinstance(error, (driver.ConnectionClosed, driver.ChannelClosed)) and len(error.args) == 2:
        code, text = error.args[0] or 0, str(error.args[1] or "")
    if isinstance(error, (driver.ChannelClosed, driver.AMQPChannelError)):
        return Closed("channel" if code else "local", code, text)
    if code:
        return Closed("connection", code, text)
    return Closed("lost", 0, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def translated(error: BaseException, doing: str) -> BrokerError:
    """An exception of the library as one of ours. To be raised from it."""
    if isinstance(error, BrokerError):
        return error
    return closing_error(reason(error), doing)
