"""Tracing by OpenTelemetry (extra ``otel``): a span for each handler and each publish, joined over brokers.

    app = App(ship, tracer=OtelTracer())

The context travels in the headers of messages, by the propagator that is configured (W3C ``traceparent`` by default:
https://www.w3.org/TR/trace-context/), so a trace goes on from the publisher's request to the last handler. Spans and
attributes are those of the semantic conventions for messaging
(https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/).

A handler's span is the child of the publish; that of a batch, which has many parents, is linked to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError("tracing by OpenTelemetry needs its API: pip install 'streamfw[otel]'") from error

from streamfw.handler import MessageBatch
from streamfw.message import Headers, Message, Outgoing
from streamfw.outcome import DeadLetter, Outcome

from .tracing import BrokerFacts, SubscriberFacts

__all__ = ["OtelTracer"]

# Names that the conventions have for systems; others are called by the scheme of their URL.
_SYSTEMS: Final = {
    "postgres": "postgresql",
    "postgres+embedded": "postgresql",
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "rabbit": "rabbitmq",
}
Attributes = dict[str, str | int]


class _Getter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = [value.decode(errors="replace") for value in carrier.all(key) if value is not None]
        return values or None

    def keys(self, carrier: Headers) -> list[str]:
        return list(carrier)


class _Setter(Setter[dict[str, str]]):
    def set(self, carrier: dict[str, str], key: str, value: str) -> None:
        carrier[key] = value


_GETTER, _SETTER = _Getter(), _Setter()


class _Current:
    """A span that is current until it ends. `context` is what else is."""

    __slots__ = ("_token", "span")

    def __init__(self, span: Span, context: Context | None) -> None:
        self.span = span
        self._token = contexts.attach(trace.set_span_in_context(span, context))

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self.span.record_exception(error)
            self.span.set_attribute("error.type", type(error).__qualname__)
            self.span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        contexts.detach(self._token)
        self.span.end()


class OtelTracer:
    """A `streamfw.observe.Tracer`. `provider` and `propagator` are the global ones unless given."""

    def __init__(self, provider: TracerProvider | None = None, propagator: TextMapPropagator | None = None) -> None:
        self._tracer = trace.get_tracer("streamfw", tracer_provider=provider)
        self._propagator = propagator

    @property
    def _propagation(self) -> TextMapPropagator:
        return self._propagator if self._propagator is not None else propagate.get_global_textmap()

    def start(self, message: Message | MessageBatch, subscriber: SubscriberFacts, /) -> _Current:
        """Begin the span of a handler."""
        attributes = _attributes("process", subscriber.system, subscriber.name)
        attributes["messaging.consumer.group.name"] = subscriber.group
        attributes["code.function.name"] = subscriber.subscriber
        # The parent is the publish, whatever is current here; baggage that came with it goes on.
        context, links = Context(), []
        if isinstance(message, MessageBatch):
            attributes["messaging.batch.message_count"] = len(message.messages)
            links = list(self._links(message.messages))
        else:
            attributes |= _of_message(message)
            attributes["streamfw.attempt"] = message.attempt
            context = self._extract(message.headers)
        name = f"process {subscriber.name}"
        return _Current(self._tracer.start_span(name, context, SpanKind.CONSUMER, attributes, links), context)

    def _extract(self, headers: Headers) -> Context:
        return self._propagation.extract(headers, Context(), _GETTER)

    def _links(self, messages: Sequence[Message]) -> Iterator[Link]:
        for message in messages:
            came_from = trace.get_current_span(self._extract(message.headers)).get_span_context()
            if came_from.is_valid:
                yield Link(came_from, {"messaging.message.id": message.message_id})

    def end(self, span: _Current, outcome: Outcome | None, error: BaseException | None, /) -> None:
        """End it, with its outcome."""
        if error is None:
            told = "unsettled" if outcome is None else type(outcome).__name__.lower()
            span.span.set_attribute("streamfw.outcome", told)
        if isinstance(outcome, DeadLetter):
            span.span.set_status(Status(StatusCode.ERROR, outcome.reason))
        span.end(error)

    def start_publish(self, message: Outgoing, broker: BrokerFacts, /) -> _Current:
        """Begin the span of a publish, below what is current, and put its context into the headers."""
        attributes = _attributes("send", broker.system, message.name) | _of_message(message)
        span = self._tracer.start_span(f"send {message.name}", None, SpanKind.PRODUCER, attributes)
        carrier: dict[str, str] = {}
        self._propagation.inject(carrier, trace.set_span_in_context(span), _SETTER)
        if carrier:
            message.headers = message.headers.merged(carrier)
        return _Current(span, None)

    def end_publish(self, span: _Current, error: BaseException | None, /) -> None:
        """End it."""
        span.end(error)


def _attributes(operation: str, system: str, name: str) -> Attributes:
    return {
        "messaging.system": _SYSTEMS.get(system, system),
        "messaging.destination.name": name,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _of_message(message: Message | Outgoing) -> Attributes:
    attributes: Attributes = {"messaging.message.id": message.message_id}
    if isinstance(message.body, bytes):
        attributes["messaging.message.body.size"] = len(message.body)
    correlation = message.headers.raw("correlation-id")
    if correlation is not None:
        attributes["messaging.message.conversation_id"] = correlation.decode(errors="replace")
    return attributes
