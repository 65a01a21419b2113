"""Seeing what an app does: the log, metrics, tracing. Nothing of it costs anything until somebody asks.

`streamfw.observe.prometheus` (extra ``prometheus``) and `streamfw.observe.otel` (extra ``otel``) are adapters, to be
imported by who wants them.
"""

from .logs import JsonFormatter, TextFormatter, configure_logging
from .metrics import Distribution, Metric
from .tracing import BrokerFacts, SubscriberFacts, Tracer

__all__ = [
    "BrokerFacts",
    "Distribution",
    "JsonFormatter",
    "Metric",
    "SubscriberFacts",
    "TextFormatter",
    "Tracer",
    "configure_logging",
]
