"""Counters and gauges as the app tells them, and as Prometheus gets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamfw import App, Backoff, DeadLetter, Drop, Rejected, Retry, subscriber
from streamfw.broker import Settlement
from streamfw.memory import MemoryBroker
from streamfw.observe import Distribution, Metric
from streamfw.observe.metrics import BOUNDS, Histogram
from streamfw.observe.prometheus import collector
from tests.helpers import eventually

from .rig import BARE, FakeSource, Order, away, prepared, pumping
from .test_app import FakeBroker

QUICK = Backoff(first=0.001, jitter=False)


def read(app: App, metric: str, /, **labels: str) -> float:
    """The one value of a metric with these labels."""
    (found,) = [m for m in app.metrics() if m.name == f"streamfw_{metric}" and labels.items() <= dict(m.labels).items()]
    assert not isinstance(found.value, Distribution)
    return found.value


def values(app: App, **labels: str) -> dict[str, float]:
    """All that is not zero of a subscriber."""
    return {
        m.name.removeprefix("streamfw_"): m.value
        for m in app.metrics()
        if labels.items() <= dict(m.labels).items() and not isinstance(m.value, Distribution) and m.value
    }


async def test_each_outcome_is_counted() -> None:
    tried: dict[str, int] = {}

    @subscriber("orders", backoff=QUICK, attempts=3, workers=2)
    async def ship(order: str) -> None:
        tried[order] = tried.get(order, 0) + 1
        if order == "drop":
            raise Drop
        if order == "dead":
            raise DeadLetter("no")
        if order == "again" and tried[order] == 1:
            raise Retry(after=0)

    app = App(ship, name="shop")
    async with app.running():
        for order in ("fine", "drop", "dead", "again"):
            await app.publish("orders", order)
        await eventually(lambda: read(app, "messages_in_flight") == 0 and len(tried) == 4)
        labels = {"subscriber": ship.__qualname__, "name": "orders", "group": "shop", "broker": "default"}
        assert values(app, **labels) == {
            "messages_fetched_total": 5,
            "messages_acknowledged_total": 2,
            "messages_retried_total": 1,
            "messages_dropped_total": 1,
            "messages_dead_lettered_total": 1,
            "prefetch_size": 100,
            "workers": 2,
            "source_live": 1,
        }
        assert values(app, broker="default")["publishes_total"] == 4
    assert [m.name for m in app.metrics()] == ["streamfw_publishes_total", "streamfw_publish_errors_total"]


async def test_gauges_and_timeouts() -> None:
    gate = asyncio.Event()

    @subscriber("slow", workers=2)
    async def slow(order: int) -> None:
        await gate.wait()

    @subscriber("late", timeout=0.01, attempts=1)
    async def late(order: int) -> None:
        await asyncio.sleep(60)

    @subscriber("held", backoff=Backoff(first=60))
    async def held(order: int) -> None:
        raise ValueError

    app = App(slow, late, held)
    async with app.running():
        for number in range(3):
            await app.publish("slow", number)
        await app.publish("late", 1)
        await app.publish("held", 1)
        await eventually(lambda: read(app, "workers_busy", name="slow") == 2)
        await eventually(lambda: read(app, "handler_timeouts_total", name="late") == 1)
        await eventually(lambda: read(app, "messages_retried_total", name="held") == 1)
        assert read(app, "messages_in_flight", name="slow") == 3
        gate.set()
        await eventually(lambda: read(app, "messages_in_flight", name="slow") == 0)
        assert read(app, "workers_busy", name="slow") == 0


async def test_a_source_that_breaks() -> None:
    broker = FakeBroker()

    @subscriber("orders")
    async def ship(order: int) -> None: ...

    app = App(ship, brokers={"default": broker})
    async with app.running():
        assert read(app, "source_live") == 1
        source = broker.sources["orders"]
        source.reopen_faults.extend(away() for _ in range(3))
        source.fail_fetch(away())
        await eventually(lambda: read(app, "source_live") == 0)
        source.reopen_faults.clear()
        await eventually(lambda: read(app, "source_reopens_total") == 1)
        assert read(app, "source_live") == 1


async def test_the_gauges_of_a_source_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = FakeBroker()

    @subscriber("orders")
    async def ship(order: int) -> None: ...

    app = App(ship, brokers={"default": broker})
    async with app.running():
        assert "source_lag" not in values(app, name="orders")
        monkeypatch.setattr(broker.sources["orders"], "gauges", lambda: {"lag": 12, "cousins": 3.5}, raising=False)
        assert read(app, "source_lag", name="orders") == 12
        assert read(app, "source_cousins", name="orders") == 3.5
        registry = CollectorRegistry()
        registry.register(collector(app))
        assert scraped(registry)["streamfw_source_lag", "orders"] == 12
        assert "# HELP streamfw_source_cousins cousins of its source." in generate_latest(registry).decode()


async def test_publishes_and_requests() -> None:
    gate = asyncio.Event()

    @subscriber("double")
    async def double(number: int) -> int:
        await gate.wait()
        return 2 * number

    app = App(double, brokers={"default": "memory://", "small": MemoryBroker(max_body=4)})
    async with app.running():
        with pytest.raises(Rejected):
            await app.publish("x", "longer than that", broker="small")
        await app.publish("x", 1, broker="small")
        assert read(app, "publishes_total", broker="small") == 1
        assert read(app, "publish_errors_total", broker="small") == 1
        with pytest.raises(TimeoutError):
            await app.request("double", 1, int, timeout=0.01)
        asking = asyncio.create_task(app.request("double", 2, int))
        await eventually(lambda: read(app, "requests_waiting") == 1)
        gate.set()
        assert await asking == 4
        assert (read(app, "requests_waiting"), read(app, "replies_late_total")) == (0, 1)


async def test_durations_only_where_asked() -> None:
    @subscriber("a")
    async def plain(order: int) -> None: ...

    @subscriber("b", durations=True)
    async def measured(order: int) -> None:
        if order == 2:
            raise Drop

    app = App(plain, measured)
    built = {one.declaration.name: one for one in app.build().subscribers}
    assert built["a"].make_plan(built["a"].source).call is built["a"].compiled.call, "nothing is around it"
    async with app.running():
        for order in (1, 2):
            await app.publish("a", order)
            await app.publish("b", order)
        await eventually(lambda: read(app, "messages_acknowledged_total", name="a") == 2)
        await eventually(lambda: read(app, "messages_in_flight", name="b") == 0)
        await eventually(lambda: read(app, "messages_dropped_total", name="b") == 1)
        (metric,) = [m for m in app.metrics() if m.kind == "histogram"]
    assert (metric.name, metric.labels["name"]) == ("streamfw_handler_duration_seconds", "b")
    assert isinstance(metric.value, Distribution)
    assert metric.value.count == 2
    assert 0 < metric.value.sum < 60


def test_the_app_asks_and_a_subscriber_says_otherwise() -> None:
    @subscriber("a")
    async def one(order: int) -> None: ...

    @subscriber("b", durations=False)
    async def other(order: int) -> None: ...

    built = App(one, other, durations=True).build().subscribers
    assert [b.durations is not None for b in built] == [True, False]


def test_durations_that_are_no_answer() -> None:
    @subscriber("a", durations="yes")  # type: ignore[arg-type]
    async def one(order: int) -> None: ...

    with pytest.raises(ExceptionGroup, match="durations: 'yes' is neither True nor False"):
        App(one).build()


def test_a_histogram_counts_up_to_its_bounds_and_beyond() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 3600.0):
        histogram.observe(seconds)
    told = histogram.read()
    counts = dict(told.buckets)
    assert (counts[0.0005], counts[0.001], counts[0.0025], counts[60.0], counts[float("inf")]) == (1, 2, 3, 3, 4)
    assert told.count == 4
    assert told.sum == pytest.approx(3600.0021)
    assert [bound for bound, _ in told.buckets] == [*BOUNDS, float("inf")]


# -- Prometheus


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Each sample by its name and the name of what it is about, through the text that Prometheus reads."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = sample.labels
            about = labels.get("name", labels.get("broker", "")) + labels.get("le", "")
            found[sample.name, about] = sample.value
    return found


async def test_prometheus_reads_what_there_is() -> None:
    @subscriber("orders")
    async def ship(order: int) -> None: ...

    @subscriber("bills")
    async def bill(order: int) -> None: ...

    app = App(ship, bill, durations=True)
    registry = CollectorRegistry()
    registry.register(collector(app))
    before = scraped(registry)
    assert not any(name == "streamfw_messages_fetched_total" for name, _ in before)
    async with app.running():
        for order in range(3):
            await app.publish("orders", order)
        await eventually(lambda: read(app, "messages_acknowledged_total", name="orders") == 3)
        # From another thread, as its own server does.
        found = await asyncio.to_thread(scraped, registry)
    assert found["streamfw_messages_acknowledged_total", "orders"] == 3
    assert found["streamfw_messages_acknowledged_total", "bills"] == 0
    assert found["streamfw_source_live", "orders"] == 1
    assert found["streamfw_publishes_total", "default"] == 3
    assert found["streamfw_handler_duration_seconds_count", "orders"] == 3
    assert found["streamfw_handler_duration_seconds_bucket", "orders+Inf"] == 3
    assert found["streamfw_handler_duration_seconds_bucket", "orders60.0"] == 3
    text = generate_latest(registry).decode()
    assert "# TYPE streamfw_handler_duration_seconds histogram" in text


async def test_reading_from_other_threads_while_messages_flow() -> None:
    """Workers are replaced for each message here, so the set that is read changes all the time."""

    @subscriber("orders", workers=8, task_per_message=False, timeout=0.0005, attempts=1, dead_letter=None)
    async def ship(order: int) -> None:
        await asyncio.sleep(60)

    app = App(ship)
    errors: list[BaseException] = []
    stop = threading.Event()

    def scrape() -> None:
        try:
            while not stop.is_set():
                app.metrics()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    async with app.running():
        for thread in threads:
            thread.start()
        try:
            await asyncio.gather(*(app.publish("orders", number) for number in range(200)))
            await eventually(lambda: read(app, "handler_timeouts_total") == 200, deadline=40)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert errors == []


def test_metrics_are_values() -> None:
    metric = Metric(name="a", kind="gauge", help="h", labels={}, value=1.0)
    change: Callable[[], Any] = lambda: setattr(metric, "value", 2.0)  # noqa: E731
    with pytest.raises(AttributeError):
        change()


async def test_a_counter_never_goes_back_also_when_the_original_of_a_dead_letter_is_lost() -> None:
    source = FakeSource(prepared(1), BARE)

    async def lose(settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            source.lose(settlement.delivery)
        source.queue.clear()

    source.before_settle = lose

    async def ship(order: Order) -> None:
        raise DeadLetter("no")

    async with pumping(ship, source) as rig:
        await eventually(lambda: rig.pump.counters.lost == 1)
        assert (rig.pump.counters.acked, rig.pump.counters.settled, rig.pump.counters.dead) == (0, 0, 1)
