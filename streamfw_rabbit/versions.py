"""What which server can do. A server takes unknown ``x-`` arguments in silence, so what it lacks is refused here.

Sources: the release notes (https://github.com/rabbitmq/rabbitmq-server/releases) and the pages on queues, quorum
queues and streams of https://www.rabbitmq.com/docs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from streamfw.config import near
from streamfw.errors import BrokerRefused

__all__ = [
    "ACTIVE_BY_PRIORITY",
    "OLDEST",
    "QUEUE_ARGUMENTS",
    "QUORUM_PRIORITIES",
    "Version",
    "argument_mistakes",
    "require",
    "require_arguments",
    "shown",
]

Version: TypeAlias = "tuple[int, ...]"

OLDEST: Final[Version] = (3, 10)
"""The oldest server that this package is for: quorum queues with message TTLs and dead-lettering at least once."""

QUORUM_PRIORITIES: Final[Version] = (4, 3)
"""The first server whose quorum queues keep to priorities. Nothing declares them: all have 32, 0 to 31, and what has
none counts as 4. From 4.0 on there were two classes, of which the one above 4 was given two of three places."""

ACTIVE_BY_PRIORITY: Final[Version] = (4, 0)
"""The first server that makes the consumer of the highest priority the single active one, of quorum queues."""

_ALWAYS: Final[Version] = ()
QUEUE_ARGUMENTS: Final[Mapping[str, Mapping[str, Version]]] = {
    "quorum": {
        "x-dead-letter-exchange": _ALWAYS,
        "x-dead-letter-routing-key": _ALWAYS,
        "x-dead-letter-strategy": (3, 10),
        "x-delivery-limit": _ALWAYS,
        "x-expires": _ALWAYS,
        "x-max-in-memory-bytes": _ALWAYS,
        "x-max-in-memory-length": _ALWAYS,
        "x-max-length": _ALWAYS,
        "x-max-length-bytes": _ALWAYS,
        "x-message-ttl": (3, 10),
        "x-overflow": _ALWAYS,
        "x-queue-leader-locator": _ALWAYS,
        "x-queue-type": _ALWAYS,
        "x-quorum-initial-group-size": _ALWAYS,
        "x-single-active-consumer": _ALWAYS,
        "x-consumer-timeout": (3, 12),
        "x-quorum-target-group-size": (3, 13),
        "x-consumer-disconnected-timeout": (4, 3),
        "x-delayed-retry-max": (4, 3),
        "x-delayed-retry-min": (4, 3),
        "x-delayed-retry-type": (4, 3),
    },
    "classic": {
        "x-dead-letter-exchange": _ALWAYS,
        "x-dead-letter-routing-key": _ALWAYS,
        "x-expires": _ALWAYS,
        "x-max-length": _ALWAYS,
        "x-max-length-bytes": _ALWAYS,
        "x-max-priority": _ALWAYS,
        "x-message-ttl": _ALWAYS,
        "x-overflow": _ALWAYS,
        "x-queue-leader-locator": (3, 10),
        "x-queue-master-locator": _ALWAYS,
        "x-queue-mode": _ALWAYS,
        "x-queue-type": _ALWAYS,
        "x-queue-version": (3, 10),
        "x-single-active-consumer": _ALWAYS,
        "x-consumer-timeout": (3, 12),
    },
    "stream": {
        "x-initial-cluster-size": _ALWAYS,
        "x-max-age": _ALWAYS,
        "x-max-length-bytes": _ALWAYS,
        "x-queue-leader-locator": _ALWAYS,
        "x-queue-type": _ALWAYS,
        "x-stream-max-segment-size-bytes": _ALWAYS,
        "x-stream-filter-size-bytes": (3, 13),
    },
}
"""By the type of queue, the arguments that mean something to it, and the first server that has them."""


def shown(version: Version) -> str:
    """A version as people write it."""
    return ".".join(map(str, version)) or "of a version that it does not tell"


def require(server: Version, least: Version, what: str) -> None:
    """Raise `BrokerRefused` when `server` is older than `least`, which `what` needs.

    A server that does not tell its version (it is no RabbitMQ) is believed to be `OLDEST`.
    """
    if (server or OLDEST) < least:
        raise BrokerRefused(f"{what} needs RabbitMQ {shown(least)} or later; the server is {shown(server)}")


def require_arguments(server: Version, kind: str, arguments: Iterable[str], where: str) -> None:
    """`require` what each argument of a queue of that type needs."""
    known = QUEUE_ARGUMENTS[kind]
    for name in arguments:
        require(server, known.get(name, _ALWAYS), f"{where}: the argument {name}")


def argument_mistakes(kind: str, arguments: Iterable[str]) -> Iterable[str]:
    """What is wrong with arguments for a queue of that type, as ends of sentences."""
    known = QUEUE_ARGUMENTS[kind]
    for name in arguments:
        if name in known or not name.startswith("x-"):
            continue
        others = [other for other, names in QUEUE_ARGUMENTS.items() if name in names]
        if others:
            yield f"{name} is for a {' or '.join(others)} queue; a {kind} queue has no such argument"
        else:
            yield f"{name} is no argument of a {kind} queue, and the server would ignore it{near(name, known)}"
