"""Hook points for tracing: a `Tracer` sees each handler and each publish from its begin to its end.

    app = App(ship, tracer=OtelTracer())

It is put around the compiled calls at build; without one nothing is there, and nothing is paid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec

from streamfw.handler import Call, MessageBatch
from streamfw.message import Message, Outgoing
from streamfw.outcome import ACK, RELEASE, SETTLED, Outcome, as_outcome
from streamfw.outlet import NextPublish

from .metrics import Histogram

__all__ = ["BrokerFacts", "Observation", "SubscriberFacts", "Tracer", "timed", "traced", "traced_publish"]

logger = logging.getLogger("streamfw")
S = TypeVar("S")


class BrokerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A broker of the app. `broker` is its name there, `system` its kind: the scheme of its URL."""

    broker: str
    system: str


class SubscriberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A subscriber. `subscriber` is its handler's name, `name` what it subscribes to, `group` who competes with it; and
    its broker, as in `BrokerFacts`."""

    subscriber: str
    name: str
    group: str
    broker: str
    system: str


class Tracer(Protocol[S]):
    """What sees handlers and publishes. `S` is its span: whatever it wants to have again at the end.

    Everything is called in the event loop, `start` and `end` of one handler in the same task and context, so what is
    current there (a context variable) is current in the handler. Nothing here may block. What a tracer raises is logged
    once and does no harm to the message.
    """

    def start(self, message: Message | MessageBatch, subscriber: SubscriberFacts, /) -> S:
        """A handler begins: with one message, or with the batch of a batch handler. Middleware, decoding and the
        transaction are within the span."""
        ...

    def end(self, span: S, outcome: Outcome | None, error: BaseException | None, /) -> None:
        """It has ended. With `error`, what it raised (an `asyncio.CancelledError`, too); or with `outcome`, which is
        None where the message is unsettled. Of a batch, the first that is no `Ack`."""
        ...

    def start_publish(self, message: Outgoing, broker: BrokerFacts, /) -> S:
        """A message is about to be published, before its middleware. It may get headers:
        ``message.headers = message.headers.merged({"traceparent": ..})``."""
        ...

    def end_publish(self, span: S, error: BaseException | None, /) -> None:
        """The broker has accepted it, or (`error`) has not."""
        ...


class _Guard:
    """Calls a tracer, and lets nothing out that it raises."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, hook: Callable[..., Any], *args: Any) -> Any:
        try:
            return hook(*args)
        except Exception as error:
            if not self._told:
                self._told = True
                logger.warning("the tracer's %s failed (told once): %r", hook.__name__, error, exc_info=error)
            return None


def traced(call: Call, tracer: Tracer[Any], facts: SubscriberFacts) -> Call:
    """`call` in a span of `tracer`."""
    guard = _Guard()

    async def call_traced(message: Any) -> Any:
        span = guard(tracer.start, message, facts)
        try:
            result = await call(message)
        except Outcome as outcome:
            if span is not None:
                guard(tracer.end, span, outcome, None)
            raise
        except BaseException as error:
            if span is not None:
                guard(tracer.end, span, None, error)
            raise
        if span is not None:
            guard(tracer.end, span, *_ended(result))
        return result

    return call_traced


def _ended(result: object) -> tuple[Outcome | None, BaseException | None]:
    """Outcome and error of what a handler returned."""
    if isinstance(result, list | tuple):  # of a batch: one an element
        result = next((one for one in cast("Sequence[object]", result) if one is not None), None)
    result = as_outcome(result) or result
    if result is RELEASE:
        return None, None
    if result is SETTLED or not isinstance(result, BaseException):
        return ACK, None
    return (result, None) if isinstance(result, Outcome) else (None, result)


def traced_publish(send: NextPublish, tracer: Tracer[Any], facts: BrokerFacts) -> NextPublish:
    """`send` in a span of `tracer`."""
    guard = _Guard()

    async def send_traced(message: Outgoing) -> None:
        span = guard(tracer.start_publish, message, facts)
        try:
            await send(message)
        except BaseException as error:
            if span is not None:
                guard(tracer.end_publish, span, error)
            raise
        if span is not None:
            guard(tracer.end_publish, span, None)

    return send_traced


def timed(call: Call, durations: Histogram, clock: Callable[[], float]) -> Call:
    """`call`, whose durations are counted."""
    observe = durations.observe

    async def call_timed(message: Any) -> Any:
        began = clock()
        try:
            return await call(message)
        finally:
            observe(clock() - began)

    return call_timed


class Observation:
    """What an app has asked to be seen of its handlers and publishes; decided at build."""

    def __init__(self, tracer: Tracer[Any] | None, durations: bool) -> None:
        self._tracer, self._durations = tracer, durations

    def around_publishes(self, facts: BrokerFacts) -> Callable[[NextPublish], NextPublish]:
        """What goes around the publishes on a broker."""
        tracer = self._tracer
        return _as_it_is if tracer is None else lambda send: traced_publish(send, tracer, facts)

    def around_handler(
        self, facts: SubscriberFacts, durations: bool | None
    ) -> tuple[Callable[[Call], Call], Histogram | None]:
        """What goes around the call of a handler, and what counts its durations (`durations`: the subscriber's own
        wish, None for the app's)."""
        tracer = self._tracer
        histogram = Histogram() if (self._durations if durations is None else durations) else None

        def around(call: Call) -> Call:
            if tracer is not None:
                call = traced(call, tracer, facts)
            return call if histogram is None else timed(call, histogram, time.perf_counter)

        return around, histogram


def _as_it_is(send: NextPublish) -> NextPublish:
    return send
