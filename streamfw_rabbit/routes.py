"""Which messages a queue's bindings take, by the rules of the server: for memory in the place of one.

https://www.rabbitmq.com/tutorials/amqp-concepts (exchanges and their types), and how RabbitMQ 3.10 and later apply them
where AMQP leaves it open: an empty topic key has no words, and a header that a binding names has to be of the same
type, which of what streamfw publishes is always text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from streamfw.broker import Route
from streamfw.errors import Unsupported
from streamfw.message import Headers, Outgoing

from .channel import FieldValue
from .headers import properties_of

if TYPE_CHECKING:
    from .queue import Binding, Exchange

__all__ = ["routes_of"]

_Takes: TypeAlias = Callable[[str, Mapping[str, FieldValue]], bool]
"""Whether a binding takes a message with this routing key and this header table."""

# What the server has from the start, of whatever type one says they are.
_SERVERS_OWN: Final = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}
_DELAYED: Final = "x-delayed-message"
_RECENT: Final = "x-recent-history"


def routes_of(bindings: Sequence[Binding]) -> dict[str, Route]:
    """The exchanges of these bindings, and which messages that are published to them are taken.

    Raises `Unsupported` for a type of exchange whose rules only the server knows.
    """
    by_exchange: dict[str, list[_Takes]] = defaultdict(list)
    for binding in bindings:
        by_exchange[binding.exchange.name].append(_rule(binding))
    return {name: _route(name, rules) for name, rules in by_exchange.items()}


def _route(exchange: str, rules: Iterable[_Takes]) -> Route:
    def takes(key: str | None, headers: Headers) -> bool:
        message = Outgoing(name=exchange, body=b"", message_id="", key=key, headers=headers)
        try:
            routing_key = key if key and len(key.encode()) <= 255 else exchange  # as it is published
            table = properties_of(message, 0, None).headers
        except ValueError:  # the server would not get it at all
            return False
        return any(rule(routing_key, table) for rule in rules)

    return takes


def _rule(binding: Binding) -> _Takes:
    exchange, wanted = binding.exchange, binding.key
    kind = _type_of(exchange)
    if exchange.internal:  # nobody publishes to it
        return lambda key, table: False
    if kind in ("fanout", _RECENT):
        return lambda key, table: True
    if kind == "direct":
        return lambda key, table: key == wanted
    if kind == "topic":
        pattern = _words(wanted)
        return lambda key, table: _matches(pattern, _words(key))
    if kind == "headers":
        arguments = binding.arguments
        return lambda key, table: _has(table, arguments)
    raise Unsupported(
        f"Exchange({exchange.name!r}, {kind!r}): only the server knows how it routes; test it there, with live=True"
    )


def _type_of(exchange: Exchange) -> str:
    kind = _SERVERS_OWN.get(exchange.name, exchange.type)
    return str(exchange.arguments.get("x-delayed-type", kind)) if kind == _DELAYED else kind


def _words(key: str) -> list[str]:
    return key.split(".") if key else []


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the words are those of the pattern, where ``*`` is any one and ``#`` are any, also none."""
    ends = {0}  # how many words the pattern can stand for, as far as it was read
    for part in pattern:
        if part == "#":
            ends = set(range(min(ends), len(words) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(words) and part in ("*", words[end])}
        if not ends:
            return False
    return len(words) in ends


def _has(table: Mapping[str, FieldValue], arguments: Mapping[str, FieldValue]) -> bool:
    """Whether a header table has what a binding's arguments name: all of it, or any; a void value stands for any."""
    how = str(arguments.get("x-match", "all"))
    named = {
        name: value
        for name, value in arguments.items()
        if name != "x-match" and (how.endswith("-with-x") or not name.startswith("x-"))
    }
    found = (
        name in table and (value is None or (isinstance(value, str) and _bytes(table[name]) == value.encode()))
        for name, value in named.items()
    )
    return any(found) if how.startswith("any") else all(found)


def _bytes(value: FieldValue) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else None
