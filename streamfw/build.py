"""From declarations to plans: everything that is known at start is decided here, and every mistake found.

`Builder` goes over the brokers, subscribers and publishers of an app once. What is wrong is collected, so that one
`ExceptionGroup` names all of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .broker import Broker, Capabilities, Delivery, Source, Subscription
from .codec import Codec
from .config import Settings, SubscriberSettings, make_broker, near, options_for
from .errors import BuildError, ConfigError, StreamError
from .handler import Call, Compiled, compile_call
from .message import Message, Outgoing, dead_letter_headers
from .middleware import Middleware, compose
from .outcome import DeadLetter, Outcome, Policy
from .publisher import Publisher, send
from .runtime.plan import Plan
from .runtime.transaction import transactional
from .subscriber import DEFAULT_DEAD_LETTER, Declaration

if TYPE_CHECKING:
    from .broker import Connection

__all__ = ["Builder", "Built", "BuiltSubscriber"]


class BuiltSubscriber(msgspec.Struct, kw_only=True):
    """One subscriber, ready to be opened. `pump` is there while the app runs."""

    declaration: Declaration
    broker: str
    subscription: Subscription
    capabilities: Capabilities
    compiled: Compiled
    make_plan: Callable[[Callable[[], Source]], Plan]
    pump: Any = None

    def source(self) -> Source:
        """Its open source, while the app runs."""
        source: Source = self.pump.source
        return source


class Built(msgspec.Struct, kw_only=True):
    """A built app."""

    brokers: dict[str, Broker]
    subscribers: list[BuiltSubscriber]
    publishers: list[Publisher[Any]]


class Builder:
    """Builds once. `connection` gives a broker's open connection by name, later, when the app runs."""

    def __init__(
        self,
        settings: Settings,
        brokers: Mapping[str, str | Broker],
        codec: Codec,
        middleware: Sequence[Middleware],
        connection: Callable[[str], Connection],
        state_type: Any,
    ) -> None:
        self._settings, self._codec, self._middleware = settings, codec, middleware
        self._connection, self._state_type = connection, state_type
        self._given = brokers
        self._errors: list[StreamError] = []
        self._brokers: dict[str, Broker] = {}
        self._publishers: list[Publisher[Any]] = []
        self._member = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"

    def build(self, declared: Sequence[Declaration], publishers: Sequence[Publisher[Any]]) -> Built:
        """Raises one `ExceptionGroup` of `BuildError` and `ConfigError`."""
        self._make_brokers()
        for name in self._settings.subscribers:
            if name not in (names := [_handler_name(d) for d in declared]):
                self._errors.append(ConfigError(f"subscribers.{name}", f"no handler has this name{near(name, names)}"))
        subscribers = [built for declaration in declared if (built := self._subscriber(declaration)) is not None]
        self._no_twins(subscribers)
        for publisher in publishers:
            self._bind(publisher, repr(publisher))
        if self._errors:
            lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(self._errors, 1))
            raise ExceptionGroup(f"the app cannot be built:{lines}\n", self._errors)
        return Built(brokers=self._brokers, subscribers=subscribers, publishers=self._publishers)

    def wrong(self, where: str, message: str) -> None:
        """Note a mistake that `build` will raise with the others."""
        self._errors.append(BuildError(where, message))

    def _make_brokers(self) -> None:
        urls: dict[str, Any] = dict(self._settings.brokers)
        urls.update(self._given)
        urls.setdefault("default", "memory://")
        for name, given in urls.items():
            try:
                self._brokers[name] = self._make_broker(name, given)
            except ConfigError as error:
                self._errors.append(error)

    def _make_broker(self, name: str, given: Any) -> Broker:
        if isinstance(given, Broker):
            return given
        if isinstance(given, str):
            # A URL given as argument takes the place of the configured one, and keeps its other options.
            options = options_for(given, self._settings.brokers.get(name, {}))
            return make_broker(f"brokers.{name}", given, options)
        options = dict(given)
        return make_broker(f"brokers.{name}", options.pop("url"), options)

    # -- one subscriber

    def _subscriber(self, d: Declaration) -> BuiltSubscriber | None:
        overrides = self._settings.subscribers.get(_handler_name(d), SubscriberSettings())
        if not overrides.enabled:
            return None
        d = _overridden(d, overrides)
        before = len(self._errors)
        broker = self._brokers.get(d.broker)
        if broker is None:
            if not any(isinstance(e, ConfigError) and e.path.startswith(f"brokers.{d.broker}.") for e in self._errors):
                self._wrong(d, f"there is no broker {d.broker!r}{near(d.broker, self._brokers)}")
            return None
        self._check_options(d)
        if len(self._errors) > before:
            return None
        subscription = self._subscription(d)
        capabilities = broker.capabilities_of(subscription)
        for mistake in (*_unhonoured(d, capabilities), *broker.mistakes(subscription)):
            self._wrong(d, mistake)
        compiled = self._compile(d, broker, subscription)
        if compiled is None or len(self._errors) > before:
            return None
        return self._assemble(d, subscription, capabilities, compiled)

    def _wrong(self, d: Declaration, message: str) -> None:
        self._errors.append(BuildError(d.where, message))

    def _check_options(self, d: Declaration) -> None:
        for what, message in _option_mistakes(d):
            self._wrong(d, f"{what}: {message}")

    def _subscription(self, d: Declaration) -> Subscription:
        dead_letter = f"{d.name}.dead" if d.dead_letter == DEFAULT_DEAD_LETTER else d.dead_letter
        return Subscription(
            d.name,
            d.group if d.group is not None else self._settings.name,
            source=None if isinstance(d.source, str) else d.source,
            workers=d.workers,
            ordered_by=d.ordered_by,
            attempts=d.attempts,
            dead_letter=dead_letter,
            prefetch=d.prefetch or max(1000, 2 * d.workers * (d.batch.size if d.batch else 1)),
            max_bytes=d.max_bytes,
            batch=d.batch.size if d.batch else None,
            timeout=d.timeout,
            transactional=d.transactional,
            member=self._member,
        )

    def _compile(self, d: Declaration, broker: Broker, subscription: Subscription) -> Compiled | None:
        try:
            compiled = compile_call(
                d.handler,
                d.codec or self._codec,
                d.where,
                batch=d.batch is not None,
                decoder=lambda annotation: broker.decoder(subscription, annotation),
            )
        except ExceptionGroup as errors:
            self._errors.extend(error for error in errors.exceptions if isinstance(error, StreamError))
            return None
        if compiled.uses_unit and not d.transactional:
            self._wrong(d, "it takes the delivery's transaction, which needs transactional=True")
        self._check_states(d, compiled)
        for parameter, (name, _) in compiled.publishers.items():
            publisher: Publisher[Any] = Publisher(name, broker=d.broker)
            self._bind(publisher, f"{d.where}, parameter {parameter!r}")
            compiled.bind(parameter, publisher)
        return compiled

    def _check_states(self, d: Declaration, compiled: Compiled) -> None:
        for parameter, kind in compiled.states.items():
            if self._state_type is None:
                self._wrong(
                    d, f"parameter {parameter!r} takes {_type_name(kind)} from the lifespan, and the app has none"
                )
            elif self._state_type is not Any and not _yields(self._state_type, kind):
                self._wrong(
                    d, f"parameter {parameter!r} takes {_type_name(kind)}, and the lifespan yields {self._state_type!r}"
                )

    def _bind(self, publisher: Publisher[Any], where: str) -> None:
        if publisher.broker not in self._brokers:
            message = f"there is no broker {publisher.broker!r}{near(publisher.broker, self._brokers)}"
            self._errors.append(BuildError(where, message))
            return
        connection, codec = self._connection, self._codec
        publisher.bind(lambda: (connection(publisher.broker), codec))
        self._publishers.append(publisher)

    def _assemble(
        self, d: Declaration, subscription: Subscription, capabilities: Capabilities, compiled: Compiled
    ) -> BuiltSubscriber:
        policy = Policy(d.attempts, d.backoff, d.on_error, subscription.dead_letter is not None)
        call: Call = compiled.call
        if d.publishes is not None:
            publisher: Publisher[Any] = Publisher(d.publishes, broker=d.broker)
            self._bind(publisher, f"{d.where}, publishes={d.publishes!r}")
            call = _publishing(call, publisher)
        call = compose(call, [*self._middleware, *d.middleware])
        if d.task_per_message:
            call = _in_a_task(call)

        def make_plan(source: Callable[[], Source]) -> Plan:
            return Plan(
                where=d.where,
                subscription=subscription,
                capabilities=capabilities,
                call=transactional(call, source, policy, d.batch is not None) if d.transactional else call,
                policy=policy,
                workers=d.workers,
                batch=d.batch,
                decode=compiled.decode,
                timeout=d.timeout,
                prefetch=d.prefetch,
                max_bytes=d.max_bytes,
                held=d.held,
                dead_letter=self._dead_letter(d, subscription),
            )

        return BuiltSubscriber(
            declaration=d,
            broker=d.broker,
            subscription=subscription,
            capabilities=capabilities,
            compiled=compiled,
            make_plan=make_plan,
        )

    def _dead_letter(
        self, d: Declaration, subscription: Subscription
    ) -> Callable[[Delivery, DeadLetter], Awaitable[None]] | None:
        target, connection, broker = subscription.dead_letter, self._connection, d.broker
        if target is None:
            return None

        async def put_aside(delivery: Delivery, outcome: DeadLetter) -> None:
            await send(connection(broker), dead_letter_of(delivery, outcome, target, subscription.group))

        return put_aside

    def _no_twins(self, subscribers: Sequence[BuiltSubscriber]) -> None:
        seen: dict[tuple[str, str, str], BuiltSubscriber] = {}
        for built in subscribers:
            key = (built.broker, built.subscription.name, built.subscription.group)
            if key in seen:
                self._wrong(
                    built.declaration,
                    f"{seen[key].declaration.where} subscribes to the same name in the same group {key[2]!r}; each "
                    "message would reach one of them by chance: give one a group= of its own",
                )
            seen.setdefault(key, built)


def dead_letter_of(delivery: Message, outcome: DeadLetter, target: str, group: str) -> Outgoing:
    """The dead letter of a delivery: its bytes and headers, the error, and where it comes from."""
    headers = dead_letter_headers(
        delivery.headers, outcome.reason, outcome.error_type, delivery.name, group, delivery.attempt
    )
    return Outgoing(name=target, body=delivery.body, message_id=delivery.message_id, key=delivery.key, headers=headers)


def _handler_name(d: Declaration) -> str:
    return str(getattr(d.handler, "__name__", ""))


def _overridden(d: Declaration, settings: SubscriberSettings) -> Declaration:
    changes = {
        name: value
        for name in ("workers", "prefetch", "timeout", "attempts", "group", "transactional")
        if (value := getattr(settings, name)) is not None
    }
    return msgspec.structs.replace(d, **changes) if changes else d


def _option_mistakes(d: Declaration) -> list[tuple[str, str]]:
    """Options whose values make no sense on any broker."""
    wrong: list[tuple[str, str]] = []
    if not d.name:
        wrong.append(("source", f"{d.source!r} is neither a name nor a source object with a name"))
    if d.group == "":
        wrong.append(("group", "a group's name is not empty"))
    for option in ("workers", "attempts", "prefetch", "held", "max_bytes"):
        value: object = getattr(d, option)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            wrong.append((option, f"{value!r} is not a whole number"))
        elif value < 1:
            wrong.append((option, f"{value} is below 1"))
    timeout: object = d.timeout
    if timeout is not None and (not isinstance(timeout, int | float) or timeout <= 0):
        wrong.append(("timeout", f"{timeout!r} is not a number of seconds above zero"))
    if d.ordered_by not in (None, "key", "partition"):
        wrong.append(("ordered_by", f'{d.ordered_by!r} is neither "key" nor "partition"'))
    if d.batch is not None and d.publishes is not None:
        wrong.append(("publishes", "a batch handler returns outcomes, so there is no value to publish"))
    if d.batch is not None and d.prefetch is not None and d.prefetch < d.batch.size:
        wrong.append(("prefetch", f"{d.prefetch} never fills a batch of {d.batch.size}"))
    rules: Mapping[Any, Any] = d.on_error
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            wrong.append(("on_error", f"{kind!r} is not a type of exception"))
        if not (callable(rule) or isinstance(rule, Outcome)):
            wrong.append(("on_error", f"{rule!r} is neither an outcome nor a function that gives one"))
    return wrong


def _unhonoured(d: Declaration, capabilities: Capabilities) -> list[str]:
    """What this broker cannot do and the runtime cannot provide."""
    wrong = []
    if d.ordered_by is not None and d.ordered_by not in capabilities.ordered_by:
        has = " or ".join(repr(order) for order in sorted(capabilities.ordered_by)) or "no order"
        wrong.append(f"ordered_by={d.ordered_by!r}: the broker keeps {has} over a group of processes")
    if d.transactional and not capabilities.transactions:
        wrong.append("transactional=True: the broker has no transactions")
    return wrong


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def _yields(state: Any, kind: Any) -> bool:
    parts = typing.get_args(state) if typing.get_origin(state) is tuple else (state,)
    return any(part is Any or part == kind or (_classes(part, kind) and issubclass(part, kind)) for part in parts)


def _classes(*kinds: Any) -> bool:
    return all(isinstance(kind, type) for kind in kinds)


def _publishing(call: Call, publisher: Publisher[Any]) -> Call:
    async def call_and_publish(message: Any) -> Any:
        result = await call(message)
        if result is None or isinstance(result, Outcome):
            return result
        await publisher.publish(result, key=message.key)
        return None

    return call_and_publish


def _in_a_task(call: Call) -> Call:
    async def call_in_a_task(message: Any) -> Any:
        async def run() -> Any:
            return await call(message)

        return await asyncio.get_running_loop().create_task(run())

    return call_in_a_task
