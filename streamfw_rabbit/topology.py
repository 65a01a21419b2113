"""What is declared on the server, for whom, and how it is called.

| what | is |
|---|---|
| the name `orders` | a fanout exchange ``orders`` |
| its group `shop` | a quorum queue ``orders.shop``, bound to it (a ``.`` in a group becomes ``+2E``) |
| its dead letter, `orders.dead` | a name like any other; what no group of it takes goes by the exchange
``orders.dead.kept`` to the quorum queue ``orders.dead`` |
| pauses | see `retry`: ``orders.shop.retry``, and ``orders.delay`` of what is published with a delay |

Each name's exchange has ``<name>.kept`` for its alternate exchange, whether there is one or not: so dead letters are
kept as long as no group has subscribed, without anybody having to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import aiormq
import msgspec

from streamfw.broker import Subscription
from streamfw.errors import BrokerRefused, BrokerUnavailable

from .channel import FieldValue
from .epochs import Epochs
from .errors import ChannelGone, NotFound, PreconditionFailed, TopologyMismatch
from .queue import EXCHANGE_NAME, Binding, Declare, Exchange, RabbitQueue, name_mistake
from .retry import LEVELS, RETRY, Ladder
from .settings import Settings
from .versions import ACTIVE_BY_PRIORITY, QUORUM_PRIORITIES, Version, require, require_arguments

__all__ = [
    "Plan",
    "declare",
    "declared",
    "delays_of",
    "delete",
    "group_queue",
    "is_kept",
    "is_missing",
    "plain_mistakes",
    "plan_of",
    "queue_ladder",
    "retries",
]

_KEPT: Final = ".kept"
_BUILT_IN: Final = frozenset({"direct", "fanout", "topic", "headers"})
# Of the queue that keeps dead letters: those that are looked at come back each time.
_LOOKS: Final = 1_000_000
_COMMAND_INVALID: Final = 503
_UNKNOWN_TYPE: Final = "unknown exchange type '"
_PLUGIN: Final = "is the plugin enabled that brings the type?"
_LADDER: Final = len(f".{RETRY}.{1000 * 2 ** (LEVELS - 1)}")


class Plan(msgspec.Struct, kw_only=True):
    """What one subscription needs on the server. `exchange` is that of a plain name; the bindings are a source's
    own."""

    where: str
    queue: str
    source: RabbitQueue
    declare: Declare
    arguments: dict[str, FieldValue]
    exchange: str | None = None
    bindings: Sequence[Binding] = ()
    dead_letter: str | None = None


def group_queue(name: str, group: str) -> str:
    """The queue of a group. Two groups never share one: behind the last dot there is nothing but the group."""
    return f"{name}.{group.replace('+', '+2B').replace('.', '+2E')}"


def plan_of(subscription: Subscription, settings: Settings) -> Plan:
    """The plan of a subscription to a plain name, or to a `RabbitQueue`."""
    queue, source = _queue_of(subscription)
    plain = subscription.source is None
    ordered = subscription.ordered_by is not None
    return Plan(
        where=f"{subscription!r}",
        queue=queue,
        source=source,
        declare=source.declare or settings.declare,
        arguments=source.queue_arguments(settings.delivery_limit, ordered, subscription.dead_letter),
        exchange=subscription.name if plain else None,
        bindings=source.bindings(),
        dead_letter=subscription.dead_letter,
    )


def _queue_of(subscription: Subscription) -> tuple[str, RabbitQueue]:
    given = subscription.source
    if isinstance(given, RabbitQueue):
        return str(given.name), given
    queue = group_queue(subscription.name, subscription.group) if given is None else subscription.name
    return queue, RabbitQueue(subscription.name)


def plain_mistakes(subscription: Subscription) -> list[str]:
    """What is wrong with a plain name, its group and its dead letter, as sentences."""
    found = []
    if not subscription.group:
        found.append("a group has a name: group='' is none")
    if subscription.source is None:
        queue = group_queue(subscription.name, subscription.group)
        for what, name, longest in (
            ("name", subscription.name, EXCHANGE_NAME - len(_KEPT)),
            ("group", queue, EXCHANGE_NAME - _LADDER),
        ):
            if (mistake := name_mistake(name, longest)) is not None:
                found.append(f"{what} {name!r}: {mistake}")
        if subscription.name.startswith("amq."):
            found.append(f"name {subscription.name!r}: names that begin with 'amq.' are the server's own")
    dead = subscription.dead_letter
    if dead is not None:
        if (mistake := name_mistake(dead, EXCHANGE_NAME - len(_KEPT))) is not None:
            found.append(f"dead_letter={dead!r}: {mistake}")
        elif subscription.source is None and dead == group_queue(subscription.name, subscription.group):
            found.append(f"dead_letter={dead!r}: this is the group's own queue; dead letters would come back for ever")
    return found


def retries(subscription: Subscription, settings: Settings) -> bool:
    """Whether pauses of this subscription, which may be mistaken, can be waited for on the server."""
    queue, source = _queue_of(subscription)
    declares = (source.declare or settings.declare) == "declare"
    return declares and source.retry and source.lasting and _can_have_ladders(queue)


def _can_have_ladders(queue: str) -> bool:
    """Whether exchanges can be called as those of its ladders are."""
    return len(queue) + _LADDER <= EXCHANGE_NAME


# Ladders


def queue_ladder(queue: str, name: str = RETRY) -> Ladder:
    """The ladder that leads to a queue."""
    return Ladder(f"{queue}.{name}", lambda channel, last: channel.queue_bind(queue, last, "#"))


def delays_of(exchange: str, queue: str) -> Ladder:
    """The ladder that leads to a name: to the exchange of a plain name, or (where `exchange` is empty) to a queue."""
    if not exchange:
        return queue_ladder(queue, "delay")

    async def bind(channel: aiormq.Channel, last: str) -> None:
        # Of another type, it would route by the key, which is the ladder's; so this has to be refused.
        await channel.exchange_declare(exchange, exchange_type="fanout", durable=True, arguments=_alternate(exchange))
        await channel.exchange_bind(exchange, last, "#")

    return Ladder(f"{exchange}.delay", bind)


# Declaring


async def declare(epochs: Epochs, plan: Plan, server: Version) -> None:
    """Declare, or look for, what `plan` says. Raises a `BrokerError`: `TopologyMismatch` for what is there with other
    properties, `NotFound` for what is missing and not to be declared."""
    _require_priorities(plan, server)
    if plan.declare == "off":
        return
    if plan.declare == "passive":
        await _look(epochs, plan, server)
        return
    require_arguments(server, str(plan.arguments["x-queue-type"]), plan.arguments, plan.where)
    with declared(plan):
        await _declare_all(epochs, plan, server)


@contextmanager
def declared(plan: Plan) -> Iterator[None]:
    """What is missing now of that which `plan` declares, somebody has just deleted: whoever tries again declares it
    again, so it is `BrokerUnavailable`."""
    try:
        yield
    except NotFound as error:
        ours = plan.declare == "declare" and any(f"{thing} in vhost" in str(error) for thing in _things(plan))
        if not ours:
            raise
        raise BrokerUnavailable(f"{error}: it was deleted after it was declared") from error


def _things(plan: Plan) -> Iterator[str]:
    """What it declares, as the server calls it."""
    names = [name for name in (plan.dead_letter, plan.exchange) if name is not None]
    yield from (f"no queue '{name}'" for name in (plan.queue, *names))
    yield from (f"no exchange '{name}{end}'" for name in names for end in ("", _KEPT))
    for binding in plan.bindings:
        if (binding.exchange.declare or "declare") == "declare" and not binding.exchange.name.startswith("amq."):
            yield f"no exchange '{binding.exchange.name}'"


async def _declare_all(epochs: Epochs, plan: Plan, server: Version) -> None:
    # First what is most likely to be there with other properties: then nothing else has been made.
    source = plan.source
    on = epochs.apart if _may_be_denied(plan) else epochs.declarations
    async with on(f"{plan.where}: declaring queue {plan.queue!r}") as channel:
        await channel.queue_declare(
            plan.queue,
            durable=source.durable,
            exclusive=source.exclusive,
            auto_delete=source.auto_delete,
            arguments=dict(plan.arguments),
        )
    if plan.dead_letter is not None:
        await _declare_kept(epochs, plan.dead_letter, plan.where)
    if plan.exchange is not None:
        await _declare_name(epochs, plan.exchange, plan.where)
    for binding in plan.bindings:
        await _declare_exchange(epochs, binding.exchange, plan, server)
    if plan.exchange is not None or plan.bindings:
        await _bind(epochs, plan)
    for ladder in _ladders_to(plan):
        await ladder.bind_again(epochs)


async def _bind(epochs: Epochs, plan: Plan) -> None:
    async with epochs.declarations(f"{plan.where}: binding queue {plan.queue!r}") as channel:
        if plan.exchange is not None:
            await channel.queue_bind(plan.queue, plan.exchange)
        for binding in plan.bindings:
            name = binding.exchange.name
            await channel.queue_bind(plan.queue, name, binding.key, arguments=dict(binding.arguments))


def _ladders_to(plan: Plan) -> Sequence[Ladder]:
    """Those that lead to its queue by a binding, if they are there. (What is delayed comes to a plain name's
    exchange.)"""
    if not plan.source.lasting or not _can_have_ladders(plan.queue):
        return ()
    retried = [queue_ladder(plan.queue)] if plan.source.retry else []
    return retried if plan.exchange is not None else [*retried, delays_of("", plan.queue)]


def _require_priorities(plan: Plan, server: Version) -> None:
    """No argument tells the server of these, so it would not even ignore them."""
    source = plan.source
    if source.type == "quorum" and source.priorities is not None:
        require(server, QUORUM_PRIORITIES, f"{plan.where}: a quorum queue with priorities")
    if source.consumer_priority and "x-single-active-consumer" in plan.arguments:
        if source.type != "quorum":
            raise BrokerRefused(
                f"{plan.where}: a classic queue with a single active consumer has no consumer_priority="
            )
        require(server, ACTIVE_BY_PRIORITY, f"{plan.where}: consumer_priority= with a single active consumer")


def _may_be_denied(plan: Plan) -> bool:
    """Whether it has what newer servers may permit no more. An exclusive queue belongs to its connection, though."""
    old = not plan.source.durable or "x-queue-master-locator" in plan.arguments
    return old and not plan.source.exclusive


async def _look(epochs: Epochs, plan: Plan, server: Version) -> None:
    """Whether all of it is there. How it is, and what is bound to what, AMQP does not tell."""
    await _look_for_queue(epochs, plan.queue, f"{plan.where}: looking for queue {plan.queue!r}")
    if plan.exchange is not None:
        await _look_for_exchange(epochs, plan.exchange, plan.where)
    for binding in plan.bindings:
        await _declare_exchange(epochs, binding.exchange, plan, server)
    if plan.dead_letter is not None:
        await _look_for_name(epochs, plan.dead_letter, plan.where)


async def is_missing(epochs: Epochs, plan: Plan) -> bool:
    """Whether a queue that is to be declared is not there yet: then it is a new one. Raises a `BrokerError`."""
    if plan.declare != "declare":
        return False
    try:
        await _look_for_queue(epochs, plan.queue, f"{plan.where}: looking for queue {plan.queue!r}")
    except NotFound:
        return True
    return False


async def _look_for_queue(epochs: Epochs, name: str, doing: str) -> None:
    async with epochs.declarations(doing) as channel:
        await channel.queue_declare(name, passive=True)


async def _look_for_exchange(epochs: Epochs, name: str, where: str) -> None:
    async with epochs.declarations(f"{where}: looking for exchange {name!r}") as channel:
        await channel.exchange_declare(name, passive=True)


async def _look_for_name(epochs: Epochs, name: str, where: str) -> None:
    """What is published to a name goes to the exchange, and where there is none to the queue."""
    try:
        await _look_for_exchange(epochs, name, where)
    except NotFound:
        await _look_for_queue(epochs, name, f"{where}: looking for {name!r}, which is no exchange, nor a queue")


async def is_kept(epochs: Epochs, name: str) -> bool:
    """Whether we have ever declared that what nobody takes of a name is kept: else a queue of that name is somebody
    else's. Raises a `BrokerError`."""
    try:
        await _look_for_exchange(epochs, f"{name}{_KEPT}", f"{name!r}")
    except NotFound:
        return False
    return True


async def _declare_name(epochs: Epochs, name: str, where: str) -> None:
    """Somebody else's fanout exchange does as well: it only keeps no dead letters."""
    try:
        async with epochs.declarations(f"{where}: declaring exchange {name!r}") as channel:
            await channel.exchange_declare(name, exchange_type="fanout", durable=True, arguments=_alternate(name))
    except TopologyMismatch as error:
        if error.argument != "alternate-exchange":
            raise


async def _declare_kept(epochs: Epochs, name: str, where: str) -> None:
    """A name whose messages are kept while nobody subscribes to it."""
    async with epochs.declarations(f"{where}: declaring the dead letter {name!r}") as channel:
        await channel.exchange_declare(f"{name}{_KEPT}", exchange_type="fanout", durable=True)
        arguments: dict[str, FieldValue] = {"x-queue-type": "quorum", "x-delivery-limit": _LOOKS}
        await channel.queue_declare(name, durable=True, arguments=arguments)
        await channel.queue_bind(name, f"{name}{_KEPT}")
        await channel.exchange_declare(name, exchange_type="fanout", durable=True, arguments=_alternate(name))


def _alternate(name: str) -> dict[str, FieldValue]:
    return {"alternate-exchange": f"{name}{_KEPT}"}


async def _declare_exchange(epochs: Epochs, exchange: Exchange, plan: Plan, server: Version) -> None:
    mode = exchange.declare or plan.declare
    if mode == "off" or exchange.name.startswith("amq."):
        return
    if exchange.type == "x-local-random":
        require(server, (4, 0), f"Exchange({exchange.name!r}, {exchange.type!r})")
    doing = f"{plan.where}: declaring exchange {exchange.name!r}"
    # Before 4.0 an unknown type ends the connection (503), so it is asked for on one that nobody else uses.
    on = epochs.declarations if exchange.type in _BUILT_IN else epochs.apart
    try:
        async with on(doing) as channel:
            if mode == "passive":
                await channel.exchange_declare(exchange.name, passive=True)
                return
            await channel.exchange_declare(
                exchange.name,
                exchange_type=exchange.type,
                durable=exchange.durable,
                internal=exchange.internal,
                auto_delete=exchange.auto_delete,
                arguments=dict(exchange.arguments),
            )
    except ChannelGone as error:
        if error.closed.code != _COMMAND_INVALID:
            raise
        raise BrokerRefused(f"{doing}: {error.closed.text}; {_PLUGIN}") from error
    except PreconditionFailed as error:
        if _UNKNOWN_TYPE not in str(error):
            raise
        raise BrokerRefused(f"{error}; {_PLUGIN}") from error


async def delete(epochs: Epochs, queue: str) -> int:
    """Delete a group's queue and all that waits for it elsewhere; return how many messages that were."""
    async with epochs.declarations(f"deleting queue {queue!r}") as channel:
        gone = await channel.queue_delete(queue)
        waited = await queue_ladder(queue).delete(channel)
    return waited + (gone.message_count or 0 if gone is not None else 0)
