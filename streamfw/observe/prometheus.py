"""The metrics of an app for `prometheus_client` (extra ``prometheus``).

    from prometheus_client import REGISTRY
    from streamfw.observe.prometheus import collector

    REGISTRY.register(collector(app))

They are read when Prometheus asks, in whatever thread that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics for Prometheus need its client: pip install 'streamfw[prometheus]'") from error

from .metrics import Distribution, Metric

if TYPE_CHECKING:
    from streamfw.app import App

__all__ = ["AppCollector", "collector"]


def collector(app: App) -> AppCollector:
    """What a registry of prometheus_client asks for the metrics of `app`. Register it once a process and app."""
    return AppCollector(app)


class AppCollector(Collector):
    """Gives the metrics of one app, whether or not it runs."""

    def __init__(self, app: App) -> None:
        self._app = app

    def collect(self) -> Iterator[Family]:
        """All metrics, those of one name together."""
        families: dict[str, Family] = {}
        for metric in self._app.metrics():
            family = families.get(metric.name)
            if family is None:
                family = families[metric.name] = _family(metric)
            _add(family, metric)
        yield from families.values()


def _family(metric: Metric) -> Family:
    labels = list(metric.labels)
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=labels)
    if metric.kind == "gauge":
        return GaugeMetricFamily(metric.name, metric.help, labels=labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=labels)


def _add(family: Family, metric: Metric) -> None:
    labels, value = list(metric.labels.values()), metric.value
    if isinstance(family, HistogramMetricFamily) and isinstance(value, Distribution):
        buckets = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in value.buckets]
        family.add_metric(labels, buckets, value.sum)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily) and not isinstance(value, Distribution):
        family.add_metric(labels, value)
