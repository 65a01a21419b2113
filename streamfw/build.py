"""From declarations to plans: everything that is known at start is decided here, and every mistake found.

`Builder` goes over the brokers, subscribers and publishers of an app once. What is wrong is collected, so that one
`ExceptionGroup` names all of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .broker import Broker, Capabilities, Placed, Source, Subscription
from .calls import in_a_task, publishing, putting_aside
from .codec import Codec, JsonCodec
from .config import Settings, SubscriberSettings, make_broker, near, options_for
from .errors import BuildError, ConfigError, StreamError
from .handler import Call, Compiled, compile_call
from .injection import Injector
from .lifespan import may_yield
from .middleware import Middleware, compose
from .observe.logs import SubscriberLog
from .observe.metrics import Histogram
from .observe.tracing import BrokerFacts, Observation, SubscriberFacts
from .options import codec_mistake, middleware_mistakes, option_mistakes
from .outcome import Policy, Retry
from .outlet import Outlet, PublishMiddleware
from .placement import place_of, placement_mistakes
from .publisher import Publisher
from .runtime.blocking import Offload
from .runtime.plan import Plan
from .runtime.replies import Inbox, replying
from .runtime.transaction import transactional
from .subscriber import DEFAULT_DEAD_LETTER, Declaration

if TYPE_CHECKING:
    from .broker import Connection

__all__ = ["Builder", "Built", "BuiltSubscriber"]


class BuiltSubscriber(msgspec.Struct, kw_only=True):
    """One subscriber, ready to be opened. `pump` is there while the app runs; `durations` where they are counted."""

    declaration: Declaration
    broker: str
    subscription: Subscription
    capabilities: Capabilities
    compiled: Compiled
    make_plan: Callable[[Callable[[], Source]], Plan]
    durations: Histogram | None = None
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
    outlets: dict[str, Outlet]
    offload: Offload


class Builder:
    """Builds once. `connection` gives a broker's open connection by name, later, when the app runs."""

    def __init__(
        self,
        settings: Settings,
        mistakes: Sequence[StreamError],
        brokers: Mapping[str, str | Broker],
        codec: Codec,
        middleware: Sequence[Middleware],
        publish_middleware: Sequence[PublishMiddleware],
        connection: Callable[[str], Connection],
        inbox: Callable[[str], Inbox],
        state_type: Any,
        observation: Observation,
        injectors: Sequence[Injector],
    ) -> None:
        self._observation, self._injectors = observation, injectors
        self._settings, self._codec, self._middleware = settings, codec, middleware
        self._publish_middleware, self._inbox = publish_middleware, inbox
        self._connection, self._state_type = connection, state_type
        self._outlets: dict[str, Outlet] = {}
        self._offload = Offload(settings.threads, settings.processes)
        self._given = brokers
        self._errors: list[StreamError] = list(mistakes)
        self._brokers: dict[str, Broker] = {}
        self._publishers: list[Publisher[Any]] = []
        self._places: dict[tuple[str, Hashable], tuple[str, Subscription]] = {}
        self._member = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"

    def build(self, declared: Sequence[Declaration], publishers: Sequence[Publisher[Any]]) -> Built:
        """Raises one `ExceptionGroup` of `BuildError` and `ConfigError`."""
        self._make_brokers()
        self._check_app()
        for name, broker in self._brokers.items():
            self._outlets[name] = Outlet(
                name,
                self._codec,
                broker.capabilities,
                self._publish_middleware,
                self._connection,
                self._inbox,
                self._observation.around_publishes(BrokerFacts(broker=name, system=_system(broker))),
            )
        for name in self._settings.subscribers:
            if name not in (names := [_handler_name(d) for d in declared]):
                self._errors.append(ConfigError(f"subscribers.{name}", f"no handler has this name{near(name, names)}"))
        enabled = [d for d in declared if self._overrides(d).enabled]
        self._no_twins(enabled)
        subscribers = [built for declaration in enabled if (built := self._subscriber(declaration)) is not None]
        for publisher in publishers:
            given: object = publisher
            if isinstance(given, Publisher):
                self._bind(given, repr(given))
            else:
                self.wrong("publishers", f"{given!r} is not a Publisher")
        if self._errors:
            lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(self._errors, 1))
            raise ExceptionGroup(f"the app cannot be built:{lines}\n", self._errors)
        return Built(
            brokers=self._brokers,
            subscribers=subscribers,
            publishers=self._publishers,
            outlets=self._outlets,
            offload=self._offload,
        )

    def wrong(self, where: str, message: str) -> None:
        """Note a mistake that `build` will raise with the others."""
        self._errors.append(BuildError(where, message))

    def _check_app(self) -> None:
        if (mistake := codec_mistake(self._codec)) is not None:
            self.wrong("codec", mistake)
            self._codec = JsonCodec()
        for where, layers in (("middleware", self._middleware), ("publish_middleware", self._publish_middleware)):
            mistakes = list(middleware_mistakes(layers))
            for mistake in mistakes:
                self.wrong(where, mistake)
            if mistakes and where == "publish_middleware":
                self._publish_middleware = ()

    def _make_brokers(self) -> None:
        urls: dict[str, Any] = dict(self._settings.brokers)
        urls.update(self._given)
        urls.setdefault("default", "memory://")
        for name, given in urls.items():
            try:
                self._brokers[name] = self._make_broker(name, given)
            except ConfigError as error:
                self._errors.append(error)
            except ExceptionGroup as errors:
                self._errors.extend(error for error in errors.exceptions if isinstance(error, StreamError))

    def _make_broker(self, name: str, given: Any) -> Broker:
        if isinstance(given, Broker):
            return given
        if isinstance(given, str):
            # A URL given as argument takes the place of the configured one, and keeps its other options.
            options = options_for(given, self._settings.brokers.get(name, {}))
            return make_broker(f"brokers.{name}", given, options)
        if not isinstance(given, Mapping):
            raise ConfigError(f"brokers.{name}", f"is a URL or a Broker, not {type(given).__name__}")
        options = dict(given)
        url = options.pop("url", None)
        if not url:
            raise ConfigError(f"brokers.{name}.url", "the broker's URL is missing")
        return make_broker(f"brokers.{name}", url, options)

    # -- one subscriber

    def _overrides(self, d: Declaration) -> SubscriberSettings:
        return self._settings.subscribers.get(_handler_name(d), SubscriberSettings())

    def _subscriber(self, declared: Declaration) -> BuiltSubscriber | None:
        before = len(self._errors)
        d = self._options(declared)
        sound = len(self._errors) == before
        broker = self._broker_of(d)
        if broker is None or not sound:
            self._signature_only(d)
            return None
        subscription = self._subscription(d)
        self._check_place(d, subscription, broker.place(subscription))
        capabilities = broker.capabilities_of(subscription)
        for mistake in (*_unhonoured(d, capabilities), *broker.mistakes(subscription)):
            self._wrong(d, mistake)
        compiled = self._compile(d, lambda annotation: broker.decoder(subscription, annotation))
        if compiled is None or len(self._errors) > before:
            return None
        return self._assemble(d, subscription, capabilities, compiled)

    def _wrong(self, d: Declaration, message: str) -> None:
        self._errors.append(BuildError(d.where, message))

    def _options(self, declared: Declaration) -> Declaration:
        """The declaration as it is in force. What the configuration made wrong is told as its mistake."""
        d = _overridden(declared, self._overrides(declared))
        own = option_mistakes(declared)
        for option, message in option_mistakes(d):
            if d is declared or (option, message) in own:
                self._wrong(d, f"{option}: {message}")
            else:
                self._errors.append(ConfigError(f"subscribers.{_handler_name(d)}.{option}", message))
        return d

    def _broker_of(self, d: Declaration) -> Broker | None:
        broker = self._brokers.get(d.broker) if isinstance(d.broker, str) else None
        if broker is None and isinstance(d.broker, str):
            self._no_broker(d.where, d.broker)
        return broker

    def _no_broker(self, where: str, name: str) -> None:
        """Note that there is none of this name, unless why it could not be made is noted already."""
        paths = (f"brokers.{name}.", f"brokers.{name}:")
        if not any(isinstance(e, ConfigError) and f"{e.path}:".startswith(paths) for e in self._errors):
            self.wrong(where, f"there is no broker {name!r}{near(name, self._brokers)}")

    def _signature_only(self, d: Declaration) -> None:
        """Something else is wrong already: find what is wrong with the parameters as well."""
        self._compile(d, lambda annotation: lambda body: body)

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

    def _check_place(self, d: Declaration, subscription: Subscription, place: Hashable) -> None:
        """Two groups that take from one queue would compete for its messages, where each is to get all of them."""
        where, other = self._places.setdefault((d.broker, place), (d.where, subscription))
        if (other.name, other.group) != (subscription.name, subscription.group):
            self._wrong(
                d,
                f"{where} of group {other.group!r} takes from the same queue as this one of group "
                f"{subscription.group!r}; each message would reach one of them by chance: give each a queue of its own",
            )

    def _compile(self, d: Declaration, decoder: Callable[[Any], Callable[[Any], Any] | None]) -> Compiled | None:
        codec = d.codec or self._codec
        if codec_mistake(codec) is not None:
            codec = JsonCodec()
        place = place_of(d.handler, d.run_in)
        for mistake in placement_mistakes(d, codec, self._settings):
            self._wrong(d, mistake)
        try:
            compiled = compile_call(
                d.handler,
                codec,
                d.where,
                batch=d.batch is not None,
                place=place,
                decoder=decoder,
                injectors=self._injectors,
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
            blocking = parameter in compiled.blocking
            compiled.bind(parameter, self._offload.blocking(publisher) if blocking else publisher)
        return compiled

    def _check_states(self, d: Declaration, compiled: Compiled) -> None:
        for parameter, kind in compiled.states.items():
            if self._state_type is None:
                self._wrong(
                    d, f"parameter {parameter!r} takes {_type_name(kind)} from the lifespan, and the app has none"
                )
            elif self._state_type is not Any and not may_yield(self._state_type, kind):
                self._wrong(
                    d, f"parameter {parameter!r} takes {_type_name(kind)}, and the lifespan yields {self._state_type!r}"
                )

    def _bind(self, publisher: Publisher[Any], where: str) -> None:
        if publisher.broker not in self._brokers:
            self._no_broker(where, publisher.broker)
            return
        publisher.bind(self._outlets[publisher.broker])
        self._publishers.append(publisher)

    def _assemble(
        self, d: Declaration, subscription: Subscription, capabilities: Capabilities, compiled: Compiled
    ) -> BuiltSubscriber:
        told = SubscriberLog(d.where, subscription).failed
        policy = Policy(d.attempts, d.backoff, d.on_error, subscription.dead_letter is not None, told)
        self._offload.take(d, d.codec or self._codec, compiled)
        call: Call = compiled.call
        if d.publishes is not None:
            publisher: Publisher[Any] = Publisher(d.publishes, broker=d.broker)
            self._bind(publisher, f"{d.where}, publishes={d.publishes!r}")
            call = publishing(call, publisher)
        if d.batch is None and compiled.returns_value:
            patterns = self._brokers[d.broker].reply_patterns if d.replies_to is None else tuple(d.replies_to)
            call = replying(call, self._outlets[d.broker].reply, patterns, d.where)
        call = compose(call, [*self._middleware, *d.middleware])
        if d.task_per_message:
            call = in_a_task(call)
        aside = putting_aside(subscription, partial(self._connection, d.broker))
        around, durations = self._observation.around_handler(self._facts(d, subscription), d.durations)

        def make_plan(source: Callable[[], Source]) -> Plan:
            return Plan(
                where=d.where,
                subscription=subscription,
                capabilities=capabilities,
                call=around(transactional(call, source, d.batch is not None) if d.transactional else call),
                policy=policy,
                workers=d.workers,
                batch=d.batch,
                decode=compiled.decode,
                timeout=d.timeout,
                prefetch=d.prefetch,
                max_bytes=d.max_bytes,
                held=d.held,
                dead_letter=aside,
            )

        return BuiltSubscriber(
            declaration=d,
            broker=d.broker,
            subscription=subscription,
            capabilities=capabilities,
            compiled=compiled,
            make_plan=make_plan,
            durations=durations,
        )

    def _facts(self, d: Declaration, subscription: Subscription) -> SubscriberFacts:
        return SubscriberFacts(
            subscriber=d.handler_name,
            name=subscription.name,
            group=subscription.group,
            broker=d.broker,
            system=_system(self._brokers[d.broker]),
        )

    def _no_twins(self, declared: Sequence[Declaration]) -> None:
        seen: dict[tuple[object, ...], Declaration] = {}
        for one in declared:
            d = _overridden(one, self._overrides(one))
            group = d.group if d.group is not None else self._settings.name
            key = (d.broker, d.name, group)
            if d.name and key in seen:
                own = "queue" if isinstance(d.source, Placed) else "group="
                self._wrong(
                    d,
                    f"{seen[key].where} subscribes to the same name in the same group {group!r}; each "
                    f"message would reach one of them by chance: give one a {own} of its own",
                )
            seen.setdefault(key, d)


def _system(broker: Broker) -> str:
    return broker.describe().partition(":")[0]


def _handler_name(d: Declaration) -> str:
    return str(getattr(d.handler, "__name__", ""))


def _overridden(d: Declaration, settings: SubscriberSettings) -> Declaration:
    changes = {
        name: value
        for name in ("workers", "prefetch", "timeout", "attempts", "group", "transactional")
        if (value := getattr(settings, name)) is not None
    }
    return msgspec.structs.replace(d, **changes) if changes else d


def _unhonoured(d: Declaration, capabilities: Capabilities) -> list[str]:
    """What this broker cannot do and the runtime cannot provide."""
    wrong = []
    if d.ordered_by is not None and d.ordered_by not in capabilities.ordered_by:
        has = " or ".join(repr(order) for order in sorted(capabilities.ordered_by)) or "no order"
        wrong.append(f"ordered_by={d.ordered_by!r}: the broker keeps {has} over a group of processes")
    if d.transactional and not capabilities.transactions:
        wrong.append("transactional=True: the broker has no transactions")
    waits_here = not capabilities.retry or (d.ordered_by is not None and not capabilities.overtaking)
    if capabilities.longest_pause is not None and waits_here:
        wrong += _long_pauses(d, capabilities.longest_pause)
    return wrong


def _long_pauses(d: Declaration, longest: float) -> list[str]:
    """What of its policy waits in the process for longer than the broker allows."""
    why = f"retries are waited for in this process here, and what is out for more than {longest:g} s may be taken back"
    wrong = [
        f"on_error: Retry(after={rule.after:g}): {why}"
        for rule in d.on_error.values()
        if isinstance(rule, Retry) and (rule.after or 0.0) > longest
    ]
    pause = d.backoff.longest(d.attempts)
    if pause > longest:
        wrong.append(f"backoff: a pause may be {pause:g} s; {why}: a Backoff(max={longest:g}) fits")
    elif d.attempts is not None and d.backoff.together(d.attempts, longest) > longest:
        wrong.append(
            f"attempts={d.attempts}: their pauses are more than {longest:g} s together; {why}, and counted anew: have "
            "fewer attempts, or shorter pauses"
        )
    return wrong


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
