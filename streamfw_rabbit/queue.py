"""`RabbitQueue` and `Exchange`: what only RabbitMQ has, said in the subscriber's own source object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from streamfw.broker import Route
from streamfw.config import near

from .channel import FieldValue
from .routes import routes_of
from .versions import argument_mistakes

__all__ = ["Binding", "Declare", "Exchange", "QueueType", "RabbitQueue", "name_mistake"]

Declare: TypeAlias = Literal["declare", "passive", "off"]
QueueType: TypeAlias = Literal["quorum", "classic"]
Overflow: TypeAlias = Literal["drop-head", "reject-publish", "reject-publish-dlx"]
Strategy: TypeAlias = Literal["at-least-once", "at-most-once"]
KeyFrom: TypeAlias = Literal["header", "routing_key"]

LEAST_LIMIT: Final = 20
QUORUM_HIGHEST: Final = 31
EXCHANGE_NAME: Final = 127
QUEUE_NAME: Final = 255
EXCHANGE_TYPES: Final = ("direct", "fanout", "topic", "headers")
# What pamqp, which writes the declarations, lets pass.
_LEGAL: Final = re.compile(r"[a-zA-Z0-9-_.:@#,/+ ]*")


class Exchange(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """An exchange: ``Exchange("events", "topic")``.

    - `type`: ``direct``, ``fanout``, ``topic``, ``headers``, or one that a plugin of the server brings.
    - `durable`, `internal`, `auto_delete`, `arguments`: as AMQP has them.
    - `declare`: as that of `RabbitQueue` (default: as the queue that is bound to it).
    """

    name: str
    type: str = "topic"
    durable: bool = True
    internal: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, Any] = {}
    declare: Declare | None = None


class Binding(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """`key` may be empty; `arguments` are for a ``headers`` exchange."""

    exchange: Exchange
    key: str = ""
    arguments: Mapping[str, FieldValue] = {}


class RabbitQueue(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A queue as it is: ``@subscriber(RabbitQueue("emails", bind="mail.*", exchange=Exchange("events")))``.

    Who subscribes to it competes, whatever their groups (two groups in one app are a mistake); what is published to it
    by name goes into it (where no exchange has that name).

    - `name`: the queue's name.
    - `type`: ``quorum`` (replicated, the default) or ``classic``.
    - `durable`, `exclusive`, `auto_delete`: of classic queues; a quorum queue is durable and neither of the others.
    - `exchange`, `bind`: what is bound to it: keys of `exchange` (one, or several), or pairs ``(exchange, key)``, or
      triples with the arguments of a ``headers`` exchange. An exchange given by its name alone is not declared.
    - `delivery_limit`: how often a quorum queue delivers a message that comes back unsettled, before it goes to the
      dead letter by itself. It is the net below ``attempts=`` for messages that kill their process, 20 at least:
      RabbitMQ counts each connection that was lost, also for messages that only waited in the process. What a
      process that stops gives back counts as well, before 4.3.
    - `max_length`, `max_bytes`, `overflow`: how much it holds, and what gives way then.
    - `message_ttl`, `expires`: seconds until a message, or the unused queue, is gone.
    - `priorities`: the highest priority of a classic queue (1 to 255). A quorum queue has priorities from RabbitMQ 4.3
      on, whether it says so or not (1 to 31); an older server is refused.
    - `single_active`: one consumer at a time, the others stand by (declared by itself with ``ordered_by=``).
    - `dead_letter_strategy`: how the server itself moves dead letters of a quorum queue. ``at-least-once`` also makes
      ``overflow="reject-publish"``, without which the server takes it for ``at-most-once``, in silence.
    - `arguments`: others, by their ``x-`` names.
    - `declare`: ``declare`` makes what is missing, and refuses what is there with other properties
      (`TopologyMismatch`); ``passive`` only looks whether it is there; ``off`` does neither. Default: the broker's.
    - `prefetch`: messages that are on their way to this process, or in it. Default: a few, and up to the subscriber's
      (1,000) as quickly as they are settled; 100 where it cannot change (with an order, one consumer at a time, or a
      queue that goes with its consumer). All of them may be in memory at once, however large they are.
    - `consumer_priority`: consumers with a higher one get messages first. Where one is active at a time it is the one
      with the highest, on quorum queues, and from RabbitMQ 4.0 on.
    - `exclusive_consumer`: nobody else may consume.
    - `key`: where the key of a message is that was not published by streamfw: ``routing_key``, or ``header`` for none.
    - `retry`: whether long pauses go through queues of their own (``<queue>.retry.<ms>``). Where not, and where
      nothing is declared, they are waited for in the process.

    Values are checked when the app is built.
    """

    name: str
    type: QueueType = "quorum"
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    exchange: Exchange | str | None = None
    bind: str | Sequence[str | tuple[Any, ...]] = ()
    delivery_limit: int | None = None
    max_length: int | None = None
    max_bytes: int | None = None
    overflow: Overflow | None = None
    message_ttl: float | None = None
    expires: float | None = None
    priorities: int | None = None
    single_active: bool = False
    dead_letter_strategy: Strategy | None = None
    arguments: Mapping[str, Any] = {}
    declare: Declare | None = None
    prefetch: int | None = None
    consumer_priority: int = 0
    exclusive_consumer: bool = False
    key: KeyFrom = "header"
    retry: bool = True

    @property
    def lasting(self) -> bool:
        """Whether it outlives its consumers, so that something may wait elsewhere for it."""
        return self.durable and not self.exclusive and not self.auto_delete and self.expires is None

    def bindings(self) -> list[Binding]:
        """What is bound to it. Raises `ValueError` for what is no binding."""
        own = _exchange(self.exchange) if self.exchange is not None else None
        given = [self.bind] if isinstance(self.bind, str) else list(self.bind)
        if not given and own is not None:
            if own.type not in ("fanout", "headers"):
                raise ValueError(f"exchange={own.name!r} without bind=: a {own.type} exchange needs keys")
            return [Binding(own)]
        return [_binding(one, own) for one in given]

    def place(self, group: str) -> str:
        """See `streamfw.broker.Placed`: the queue, whatever the group."""
        return str(self.name)

    def route(self, name: str) -> Route | None:
        """See `streamfw.broker.Routed`: the exchanges that it is bound to lead to it."""
        if found := self.mistakes(dead_letter=False):
            raise ValueError("; ".join(found))
        return routes_of(self.bindings()).get(name)

    def queue_arguments(self, delivery_limit: int, ordered: bool, dead_letter: str | None) -> dict[str, FieldValue]:
        """The arguments it is declared with. `dead_letter`: the exchange that the server's own dead letters go to."""
        found: dict[str, FieldValue] = {"x-queue-type": self.type}
        if dead_letter is not None:
            found["x-dead-letter-exchange"] = dead_letter
        if self.type == "quorum":
            found["x-delivery-limit"] = self.delivery_limit or delivery_limit
            if dead_letter is not None and (strategy := self.dead_letter_strategy or "at-least-once"):
                found["x-dead-letter-strategy"] = strategy
                if strategy == "at-least-once":
                    found["x-overflow"] = "reject-publish"
        if ordered or self.single_active:
            found["x-single-active-consumer"] = True
        own = {
            "x-max-length": self.max_length,
            "x-max-length-bytes": self.max_bytes,
            "x-overflow": self.overflow,
            "x-message-ttl": _milliseconds(self.message_ttl),
            "x-expires": _milliseconds(self.expires),
            "x-max-priority": self.priorities if self.type == "classic" else None,
        }
        return found | {name: value for name, value in own.items() if value is not None} | dict(self.arguments)

    def mistakes(self, dead_letter: bool) -> list[str]:
        """What is wrong with it, as sentences. `dead_letter`: whether its subscriber has one."""
        given: object = self.type
        if given not in get_args(QueueType):
            return [f"RabbitQueue(type={given!r}): one of {', '.join(get_args(QueueType))} is needed"]
        if found := list(type_mistakes(self)):
            return found
        found = [*self._name_mistakes(), *self._choice_mistakes(), *self._number_mistakes()]
        found += self._quorum_mistakes(dead_letter) if self.type == "quorum" else self._classic_mistakes()
        found += self._argument_mistakes()
        try:
            for binding in self.bindings():
                found += _binding_mistakes(binding)
        except ValueError as error:
            found.append(f"RabbitQueue(bind=..): {error}")
        return found

    def _name_mistakes(self) -> Iterable[str]:
        if (mistake := name_mistake(self.name, QUEUE_NAME)) is not None:
            yield f"RabbitQueue({self.name!r}): {mistake}"
        elif self.declare in (None, "declare") and self.name.startswith("amq."):
            yield f"RabbitQueue({self.name!r}): names that begin with 'amq.' are the server's own"

    def _choice_mistakes(self) -> Iterable[str]:
        choices: Sequence[tuple[str, Any, object]] = (
            ("overflow", Overflow, self.overflow),
            ("dead_letter_strategy", Strategy, self.dead_letter_strategy),
            ("declare", Declare, self.declare),
            ("key", KeyFrom, self.key),
        )
        for option, known, value in choices:
            if value not in get_args(known) and not (value is None and option != "key"):
                yield f"RabbitQueue({option}={value!r}): one of {', '.join(get_args(known))} is needed"

    def _number_mistakes(self) -> Iterable[str]:
        for option, low, high in (
            ("max_length", 0, 2**63 - 1),
            ("max_bytes", 0, 2**63 - 1),
            ("priorities", 1, 255),
            ("prefetch", 1, 65535),
            ("consumer_priority", -(2**31), 2**31 - 1),
        ):
            value: object = getattr(self, option)
            if value is not None and (not isinstance(value, int) or not low <= value <= high):
                yield f"RabbitQueue({option}={value!r}): a whole number from {low} to {high} is needed"
        for option in ("message_ttl", "expires"):
            seconds: object = getattr(self, option)
            least = 0.001 if option == "expires" else 0
            if seconds is not None and (not isinstance(seconds, int | float) or not least <= seconds < 2**32 / 1000):
                yield f"RabbitQueue({option}={seconds!r}): seconds, at most 49 days, are needed"

    def _quorum_mistakes(self, dead_letter: bool) -> Iterable[str]:
        if not self.durable or self.exclusive or self.auto_delete:
            yield "RabbitQueue(..): a quorum queue is durable, not exclusive and not auto_delete; or say type='classic'"
        priorities: object = self.priorities
        if isinstance(priorities, int) and QUORUM_HIGHEST < priorities <= 255:
            yield f"RabbitQueue(priorities={priorities}): the highest of a quorum queue is {QUORUM_HIGHEST}"
        if self.overflow == "reject-publish-dlx":
            yield "RabbitQueue(overflow='reject-publish-dlx'): a quorum queue ignores it; say 'reject-publish'"
        limit: object = self.delivery_limit
        if limit is not None and (not isinstance(limit, int) or not LEAST_LIMIT <= limit < 2**31):
            yield (
                f"RabbitQueue(delivery_limit={limit!r}): {LEAST_LIMIT} at least: a lost connection counts, also for "
                "messages that only waited in the process"
            )
        if dead_letter and self.overflow == "drop-head" and self.dead_letter_strategy != "at-most-once":
            yield (
                "RabbitQueue(overflow='drop-head'): the server would move dead letters at most once, in silence; say "
                "overflow='reject-publish', or dead_letter_strategy='at-most-once'"
            )

    def _classic_mistakes(self) -> Iterable[str]:
        for option in ("delivery_limit", "dead_letter_strategy"):
            if getattr(self, option) is not None:
                yield f"RabbitQueue({option}=..): only a quorum queue has one"
        if self.single_active and self.consumer_priority:
            yield "RabbitQueue(consumer_priority=..): with single_active= only a quorum queue heeds it"

    def _argument_mistakes(self) -> Iterable[str]:
        yield from (f"RabbitQueue(arguments=..): {told}" for told in argument_mistakes(self.type, self.arguments))
        for argument, option in _OPTIONS.items():
            if argument in self.arguments:
                yield f"RabbitQueue(arguments=..): {argument} is said by {option}"


_OPTIONS: Final = {
    "x-queue-type": "type=",
    "x-delivery-limit": "delivery_limit=",
    "x-dead-letter-exchange": "dead_letter= of the subscriber",
    "x-dead-letter-strategy": "dead_letter_strategy=",
    "x-single-active-consumer": "single_active=",
    "x-max-length": "max_length=",
    "x-max-length-bytes": "max_bytes=",
    "x-overflow": "overflow=",
    "x-message-ttl": "message_ttl=",
    "x-expires": "expires=",
    "x-max-priority": "priorities=",
}


def type_mistakes(source: object, fields: Iterable[str] | None = None) -> Iterable[str]:
    """Which of these fields (None: all that it has) of a source object or exchange are not of their type: without
    that, nothing else can be said of them."""
    for field, (needed, fits) in _TYPES.items():
        value: object = getattr(source, field, _ABSENT)
        if value is not _ABSENT and (fields is None or field in fields) and not fits(value):
            yield f"{type(source).__name__}({field}={value!r}): {needed}"


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_ABSENT: Final = object()
_TYPES: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "name": ("text is needed", lambda value: isinstance(value, str)),
    "bind": (
        "a key, or a list of keys and of (exchange, key) and (exchange, key, arguments), is needed",
        lambda value: isinstance(value, str) or (isinstance(value, Sequence) and not isinstance(value, bytes)),
    ),
    "arguments": ("a mapping of names to values is needed", _is_table),
} | dict.fromkeys(
    ("durable", "exclusive", "auto_delete", "internal", "single_active", "exclusive_consumer", "retry"),
    ("True or False is needed", _is_flag),
)


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _exchange(given: object) -> Exchange:
    if isinstance(given, Exchange):
        return given
    if isinstance(given, str):
        return Exchange(given, declare="off")
    raise ValueError(f"{given!r} is no Exchange, nor the name of one")


def _binding(given: object, own: Exchange | None) -> Binding:
    if isinstance(given, str):
        if own is None:
            raise ValueError(f"{given!r} is a key: say of which exchange=, or give a pair (exchange, key)")
        return Binding(own, given)
    if isinstance(given, tuple) and len(given) in (2, 3) and isinstance(given[1], str):
        arguments = given[2] if len(given) == 3 else {}
        if _is_table(arguments):
            return Binding(_exchange(given[0]), given[1], arguments)
    raise ValueError(f"{given!r} is neither a key nor (exchange, key) nor (exchange, key, arguments)")


def _binding_mistakes(binding: Binding) -> Iterable[str]:
    exchange = binding.exchange
    if found := list(type_mistakes(exchange)):
        yield from found
        return
    kind: object = exchange.type
    if not isinstance(kind, str) or not (kind in EXCHANGE_TYPES or kind.startswith("x-")):
        hint = near(kind, EXCHANGE_TYPES) if isinstance(kind, str) else f"; known are {', '.join(EXCHANGE_TYPES)}"
        said = f"Exchange({exchange.name!r}, type={kind!r})"
        yield f"{said}: there is no such type, and those of plugins begin with 'x-'{hint}"
    if (mistake := name_mistake(exchange.name, EXCHANGE_NAME)) is not None:
        yield f"Exchange({exchange.name!r}): {mistake}"
    if exchange.declare is not None and exchange.declare not in get_args(Declare):
        yield f"Exchange(declare={exchange.declare!r}): one of {', '.join(get_args(Declare))} is needed"
    if len(binding.key.encode(errors="replace")) > 255:
        yield f"RabbitQueue(bind=..): the key {binding.key[:40]!r}.. is longer than 255 bytes"


def name_mistake(name: str, longest: int) -> str | None:
    """What is wrong with the name of a queue or exchange of at most `longest` characters; None: nothing."""
    if not name:
        return "the name is empty"
    if len(name) > longest:
        return f"the name has {len(name)} characters, and {longest} is the most"
    if not _LEGAL.fullmatch(name):
        return "a name has letters, digits, spaces and -_.:@#,/+ only (the rule of the AMQP library)"
    return None
