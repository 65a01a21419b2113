"""Counters and gauges: what the runtime counts anyway, read when somebody asks.

Reading copies a few integers; nothing is counted for it, nothing is locked, and any thread may read. Names follow the
conventions of Prometheus. Counters begin at zero whenever the app starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from streamfw.app import App
    from streamfw.build import Built, BuiltSubscriber
    from streamfw.runtime.pump import Pump

__all__ = ["BOUNDS", "Distribution", "Histogram", "Kind", "Metric", "collect"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the durations that are counted together, in seconds."""


class Distribution(msgspec.Struct, frozen=True):
    """How many values were at most each bound: pairs of the bound (the last is infinity) and a count that includes all
    smaller ones; and the `sum` of the values."""

    buckets: tuple[tuple[float, int], ...]
    sum: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return self.buckets[-1][1]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One value. `kind` says what it is: a ``counter`` only grows while the app runs, a ``gauge`` goes up and down, a
    ``histogram`` has a `Distribution`."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, str]
    value: float | Distribution


class Histogram:
    """Counts durations, in seconds; for handlers, only where somebody asked for it."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def read(self) -> Distribution:
        """What was counted until now."""
        total, buckets = 0, list[tuple[float, int]]()
        for bound, count in zip((*BOUNDS, float("inf")), tuple(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        return Distribution(tuple(buckets), self._sum)


_COUNTERS: Final = (
    ("fetched", "messages_fetched", "Messages taken from the broker."),
    ("acked", "messages_acknowledged", "Messages that were handled and acknowledged."),
    ("retried", "messages_retried", "Failures that were to be tried again."),
    ("dropped", "messages_dropped", "Messages that were discarded."),
    ("dead", "messages_dead_lettered", "Messages that went to the dead letter."),
    ("released", "messages_released", "Messages that were given back, or begun again, unsettled."),
    ("lost", "messages_lost", "Deliveries that turned out to be somebody else's by then."),
    ("reopened", "source_reopens", "How often the source broke and was opened again."),
)

_OF_SOURCES: Final = {
    "lag": "Messages from what is settled to the end of its partitions, as last heard.",
    "open": "Messages that were read and are not settled.",
    "partitions": "Partitions that it reads.",
    "buffered": "Messages that came and wait to be fetched.",
    "prefetch": "Messages that may be open at the same time.",
}


def collect(app: App) -> list[Metric]:
    """The metrics of `app`; none of a subscriber while the app does not run."""
    built = app.built
    return [] if built is None else [*_of_subscribers(app, built), *_of_brokers(app, built)]


def _of_subscribers(app: App, built: Built) -> Iterator[Metric]:
    running = {id(pump) for pump in app.pumps}
    for one in built.subscribers:
        if one.pump is not None and id(one.pump) in running:
            yield from _of_pump(one.pump, _labels(one))
        if one.durations is not None:
            yield Metric(
                name="streamfw_handler_duration_seconds",
                kind="histogram",
                help="How long handlers took, with their middleware and transaction.",
                labels=_labels(one),
                value=one.durations.read(),
            )


def _labels(one: BuiltSubscriber) -> dict[str, str]:
    handler, subscription = one.declaration.handler_name, one.subscription
    return {"subscriber": handler, "name": subscription.name, "group": subscription.group, "broker": one.broker}


def _of_pump(pump: Pump, labels: Mapping[str, str]) -> Iterator[Metric]:
    def metric(kind: Kind, name: str, text: str, value: float) -> Metric:
        return Metric(name=f"streamfw_{name}", kind=kind, help=text, labels=labels, value=value)

    for counter, name, text in _COUNTERS:
        yield metric("counter", f"{name}_total", text, getattr(pump.counters, counter))
    crew = pump.crew
    yield metric("counter", "handler_timeouts_total", "Handlers that were cancelled by their timeout.", crew.timeouts)
    yield metric("gauge", "messages_in_flight", "Messages in this process: ready, running, held.", pump.in_flight)
    yield metric("gauge", "messages_held", "Messages that wait for a retry, or behind one.", pump.lanes.held)
    yield metric("gauge", "prefetch_size", "How many messages it keeps at hand, at present.", pump.prefetch.size)
    yield metric("gauge", "workers", "How many messages it handles at the same time, at most.", crew.workers)
    # A copy, in one step of the interpreter: the reader may be another thread.
    yield metric("gauge", "workers_busy", "Workers that have work.", sum(slot.busy for slot in list(crew.slots)))
    yield metric("gauge", "source_live", "1: its source is live; 0: it is not.", int(pump.health().ok))
    for gauge, value in pump.source.gauges().items():
        yield metric("gauge", f"source_{gauge}", _OF_SOURCES.get(gauge, f"{gauge} of its source."), value)


def _of_brokers(app: App, built: Built) -> Iterator[Metric]:
    for name, outlet in built.outlets.items():
        labels = {"broker": name}
        for metric, text, value in (
            ("publishes", "Messages that the broker accepted.", outlet.published),
            ("publish_errors", "Messages that it did not accept.", outlet.refused),
        ):
            yield Metric(name=f"streamfw_{metric}_total", kind="counter", help=text, labels=labels, value=value)
    for inbox in app.inboxes:
        labels = {"broker": inbox.broker}
        yield Metric(
            name="streamfw_requests_waiting",
            kind="gauge",
            help="Requests that wait for their reply.",
            labels=labels,
            value=inbox.waiting,
        )
        yield Metric(
            name="streamfw_replies_late_total",
            kind="counter",
            help="Replies that came when nobody waited for them any more.",
            labels=labels,
            value=inbox.late,
        )
