"""A tracer sees each handler and publish, does no harm, and is not there where nobody asked; and OpenTelemetry's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from streamfw import (
    Ack,
    App,
    Backoff,
    Batch,
    Message,
    MessageBatch,
    Next,
    NextPublish,
    Outcome,
    Outgoing,
    PartialFailure,
    Rejected,
    Retry,
    subscriber,
)
from streamfw.broker import Delivery
from streamfw.memory import MemoryBroker
from streamfw.observe import BrokerFacts, SubscriberFacts
from streamfw.observe.otel import OtelTracer
from streamfw.observe.tracing import traced
from streamfw.outcome import ACK, RELEASE, SETTLED
from tests.helpers import eventually

QUICK = Backoff(first=0.001, jitter=False)
CURRENT: ContextVar[str] = ContextVar("current")


def name_of(thing: object) -> str | None:
    return None if thing is None else type(thing).__name__


class Notes:
    """A tracer that takes notes, and makes its span current."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None, str | None]] = []
        self.facts: list[SubscriberFacts | BrokerFacts] = []
        self.tokens: dict[str, Any] = {}

    def start(self, message: Message | MessageBatch, subscriber: SubscriberFacts) -> str:
        self.facts.append(subscriber)
        about = message.messages[0] if isinstance(message, MessageBatch) else message
        span = f"handle {about.message_id} {about.attempt}"
        self.tokens[span] = CURRENT.set(span)
        return span

    def end(self, span: str, outcome: Outcome | None, error: BaseException | None) -> None:
        CURRENT.reset(self.tokens.pop(span))
        self.ended.append((span, name_of(outcome), name_of(error)))

    def start_publish(self, message: Outgoing, broker: BrokerFacts) -> str:
        self.facts.append(broker)
        message.headers = message.headers.merged({"traceparent": CURRENT.get("nothing")})
        return f"publish {message.message_id}"

    def end_publish(self, span: str, error: BaseException | None) -> None:
        self.ended.append((span, None, name_of(error)))


async def test_it_sees_begin_and_end_and_what_is_current_reaches_the_handler() -> None:
    notes, seen = Notes(), []

    @subscriber("orders", attempts=2, backoff=QUICK, publishes="receipts")
    async def ship(order: str, message: Message) -> str:
        await asyncio.sleep(0)
        seen.append((CURRENT.get(), message.headers["traceparent"]))
        if message.attempt == 1:
            raise ValueError
        return order

    @subscriber("receipts")
    async def file(receipt: str, message: Message) -> None:
        seen.append((CURRENT.get(), message.headers["traceparent"]))

    app = App(ship, file, name="shop", tracer=notes)
    async with app.running():
        await app.publish("orders", "tea", message_id="a")
        await eventually(lambda: len(seen) == 3 and len(notes.ended) == 5)
    assert seen[:2] == [("handle a 1", "nothing"), ("handle a 2", "nothing")]
    current, parent = seen[2]
    assert (current.startswith("handle "), parent) == (True, "handle a 2")
    wanted = {("publish a", None, None), ("handle a 1", None, "ValueError"), ("handle a 2", "Ack", None)}
    assert {end for end in notes.ended if " a" in end[0]} == wanted
    assert notes.facts[0] == BrokerFacts(broker="default", system="memory")
    assert notes.facts[1] == SubscriberFacts(
        subscriber=ship.__qualname__, name="orders", group="shop", broker="default", system="memory"
    )
    assert CURRENT.get("none") == "none"


async def test_workers_are_not_replaced_for_it() -> None:
    """It leaves each worker's context as it was."""
    handled = []

    @subscriber("orders")
    async def ship(order: int) -> None:
        handled.append(order)

    app = App(ship, tracer=Notes())
    async with app.running():
        for order in range(20):
            await app.publish("orders", order)
        await eventually(lambda: len(handled) == 20)
        (pump,) = app.pumps
        assert (pump.crew.replaced, pump.crew.isolated) == (0, False)


async def test_middleware_is_within_the_span_and_sees_the_headers() -> None:
    notes, seen = Notes(), []

    async def around(message: Message, call_next: Next) -> object:
        seen.append(CURRENT.get())
        return await call_next(message)

    async def before(message: Outgoing, call_next: NextPublish) -> None:
        seen.append(message.headers["traceparent"])
        await call_next(message)

    @subscriber("orders")
    async def ship(order: int) -> None: ...

    app = App(ship, tracer=notes, middleware=[around], publish_middleware=[before])
    async with app.running():
        await app.publish("orders", 1, message_id="a")
        await eventually(lambda: len(seen) == 2)
    assert seen == ["nothing", "handle a 1"]


async def test_a_publish_that_is_refused() -> None:
    notes = Notes()
    app = App(brokers={"default": MemoryBroker(max_body=2)}, tracer=notes)
    async with app.running():
        with pytest.raises(Rejected):
            await app.publish("orders", "too long", message_id="a")
    assert notes.ended == [("publish a", None, "TooLarge")]


@pytest.mark.parametrize(
    ("result", "outcome", "error"),
    [
        (None, "Ack", None),
        ("a value", "Ack", None),
        (SETTLED, "Ack", None),
        (RELEASE, None, None),
        (Retry(after=1), "Retry", None),
        ([None, ACK], "Ack", None),
        ([None, Retry(), ACK], "Retry", None),
        ([None, ValueError()], None, "ValueError"),
        ([], "Ack", None),
    ],
    ids=repr,
)
async def test_how_a_result_ends_the_span(result: object, outcome: str | None, error: str | None) -> None:
    notes = Notes()

    async def handler(message: Any) -> object:
        return result

    facts = SubscriberFacts(subscriber="ship", name="a", group="g", broker="default", system="memory")
    assert await traced(handler, notes, facts)(Delivery(name="a", body=b"", message_id="m")) is result
    assert notes.ended == [("handle m 1", outcome, error)]


@pytest.mark.parametrize(
    "raised", [Ack(), Retry(), ValueError(), PartialFailure({0: ValueError()}), asyncio.CancelledError()]
)
async def test_how_what_is_raised_ends_it(raised: BaseException) -> None:
    notes = Notes()

    async def handler(message: Any) -> object:
        raise raised

    facts = SubscriberFacts(subscriber="ship", name="a", group="g", broker="default", system="memory")
    with pytest.raises(type(raised)) as caught:
        await traced(handler, notes, facts)(Delivery(name="a", body=b"", message_id="m"))
    assert caught.value is raised
    name = type(raised).__name__
    assert notes.ended == [("handle m 1", *((name, None) if isinstance(raised, Outcome) else (None, name)))]


class Broken:
    def start(self, message: object, subscriber: object) -> object:
        raise RuntimeError("start")

    end = start_publish = start

    def end_publish(self, span: object, error: object) -> None:
        raise RuntimeError("end")


class BrokenLater(Broken):
    def start(self, message: object, subscriber: object) -> object:
        return "span"

    start_publish = start

    def end(self, *args: object) -> None:
        raise RuntimeError("end")


@pytest.mark.parametrize("tracer", [Broken(), BrokenLater()])
async def test_a_broken_tracer_does_no_harm_and_is_told_once(tracer: Any, caplog: pytest.LogCaptureFixture) -> None:
    handled = []

    @subscriber("orders")
    async def ship(order: int) -> None:
        handled.append(order)

    app = App(ship, tracer=tracer)
    async with app.running():
        for order in range(3):
            await app.publish("orders", order)
        await eventually(lambda: handled == [0, 1, 2])
        await eventually(lambda: app.pumps[0].counters.acked == 3)
    told = [record.getMessage() for record in caplog.records if "tracer" in record.getMessage()]
    assert len(told) == 2, "once for the handler, once for publishes"


def test_nothing_is_there_without_one() -> None:
    @subscriber("orders")
    async def ship(order: int) -> None: ...

    (built,) = (app := App(ship)).build().subscribers
    assert built.make_plan(built.source).call is built.compiled.call
    outlet = app.build().outlets["default"]
    assert outlet.send == outlet._send


# -- OpenTelemetry


class Spans(InMemorySpanExporter):
    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.get_finished_spans() if span.name == name]
        return span


@asynccontextmanager
async def otel(*handlers: Any, **options: Any) -> AsyncIterator[tuple[App, Spans]]:
    spans, provider = Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app = App(*handlers, name="shop", tracer=OtelTracer(provider), **options)
    async with app.running():
        yield app, spans
    provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_one_trace_from_the_request_to_the_last_handler() -> None:
    found = []

    @subscriber("orders", publishes="receipts")
    async def ship(order: str) -> str:
        return order

    @subscriber("receipts")
    async def file(receipt: str) -> None:
        found.append((trace.get_current_span().get_span_context().trace_id, baggage.get_baggage("tenant")))

    async with otel(ship, file) as (app, spans):
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        await app.publish("orders", "tea", message_id="a", correlation_id="c")
        context.detach(token)
        await eventually(lambda: len(spans.get_finished_spans()) == 4)
    send, process = spans.named("send orders"), spans.named("process orders")
    second, last = spans.named("send receipts"), spans.named("process receipts")
    for child, parent in ((process, send), (second, process), (last, second)):
        assert child.parent is not None
        assert parent.context is not None
        assert child.parent.span_id == parent.context.span_id
    assert send.context is not None
    assert found == [(send.context.trace_id, "acme")]
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert attributes(send) == {
        "messaging.system": "memory",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": "a",
        "messaging.message.body.size": 5,
        "messaging.message.conversation_id": "c",
    }
    assert attributes(process) == {
        "messaging.system": "memory",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "shop",
        "code.function.name": ship.__qualname__,
        "messaging.message.id": "a",
        "messaging.message.body.size": 5,
        "messaging.message.conversation_id": "c",
        "streamfw.attempt": 1,
        "streamfw.outcome": "ack",
    }


async def test_failures_have_a_status_and_the_error() -> None:
    @subscriber("orders", attempts=2, backoff=QUICK)
    async def ship(order: str, message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no tea")
        raise Retry

    async with otel(ship) as (app, spans):
        await app.publish("orders", "tea")
        await eventually(lambda: len(spans.get_finished_spans()) == 3)
        await eventually(lambda: app.pumps[0].counters.dead == 1)
    first, second = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CONSUMER]
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "ValueError: no tea")
    assert attributes(first)["error.type"] == "ValueError"
    assert [event.name for event in first.events] == ["exception"]
    assert (second.status.status_code, attributes(second)["streamfw.outcome"]) == (StatusCode.UNSET, "retry")
    assert second.parent == first.parent, "both are of the same publish"


async def test_a_batch_is_linked_to_all_its_publishes() -> None:
    @subscriber("orders", batch=Batch(3, wait=5))
    async def ship(orders: list[int]) -> None: ...

    async with otel(ship) as (app, spans):
        for number in range(3):
            await app.publish("orders", number)
        await eventually(lambda: len(spans.get_finished_spans()) == 4)
    batch = spans.named("process orders")
    sent = {s.context.span_id for s in spans.get_finished_spans() if s.kind is SpanKind.PRODUCER and s.context}
    assert batch.parent is None
    assert {link.context.span_id for link in batch.links} == sent
    assert len(sent) == attributes(batch)["messaging.batch.message_count"] == 3


@pytest.mark.parametrize("header", [b"nonsense", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b""])
async def test_a_forged_header_begins_a_trace_of_its_own(header: bytes) -> None:
    message = Delivery(name="orders", body=b"1", message_id="m")
    message.raw_headers = message.headers.merged({"traceparent": header, "tracestate": header, "baggage": header})
    spans, provider = Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = OtelTracer(provider)
    facts = SubscriberFacts(subscriber="ship", name="orders", group="g", broker="default", system="postgres")
    tracer.end(tracer.start(message, facts), ACK, None)
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert attributes(span)["messaging.system"] == "postgresql"


async def test_without_a_provider_nothing_is_exported_and_a_context_goes_on() -> None:
    """The API alone passes the context that came on, as it says it does."""
    seen = []

    @subscriber("orders")
    async def ship(order: int, message: Message) -> None:
        seen.append(message.headers.get("traceparent"))

    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    app = App(ship, tracer=OtelTracer(trace.NoOpTracerProvider()))
    async with app.running():
        await app.publish("orders", 1)
        await app.publish("orders", 2, headers={"traceparent": parent})
        await eventually(lambda: len(seen) == 2)
    assert seen == [None, parent]


@pytest.mark.parametrize(
    ("library", "module", "extra"),
    [
        ("opentelemetry", "streamfw.observe.otel", "streamfw[otel]"),
        ("prometheus_client", "streamfw.observe.prometheus", "streamfw[prometheus]"),
        ("dishka", "streamfw.integrations.dishka", "streamfw[dishka]"),
        ("fastapi", "streamfw.integrations.fastapi", "pip install fastapi"),
    ],
)
def test_a_library_that_is_missing_is_told_with_its_extra(library: str, module: str, extra: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert extra in done.stderr.splitlines()[-1]
