"""The conformance suite: what every broker must hold, as tests that anybody can run on a broker of their own.

Write a test class, and say which broker it is::

    import pytest_asyncio
    from streamfw.testing.conformance import BrokerConformance

    class TestMyBroker(BrokerConformance):
        grace = 5.0  # seconds a timed event may be late: 1 in process (the default), 5 on a server

        @pytest_asyncio.fixture
        async def broker(self, my_server):
            return MyBroker(my_server.url)

It needs pytest and pytest-asyncio (any mode), and a broker that nobody else uses the names ``conformance.*`` of.
What else a class may override stands in `ConformanceKit`: `another` (the broker as a second process configures it),
`interrupt` (cut every connection), `unpublishable` (a message to be refused), `unreachable` (for the test that no
error shows a password).

There are two levels. `SourceConformance` drives connections and sources by hand; start with it, the failures are
nearest to their cause. `AppConformance` runs handlers in an `App`. `BrokerConformance` is both. Nothing is skipped:
where a broker declares that it lacks something, the same test checks what the contract promises instead (it is
refused, or the runtime does it).
"""

from __future__ import annotations

from ._app_delivery import AppDeliveryConformance
from ._app_failure import AppFailureConformance
from ._app_replies import AppRepliesConformance
from ._delivery import DeliveryConformance
from ._kit import ConformanceKit, Member
from ._lifecycle import LifecycleConformance
from ._order import OrderConformance
from ._publishing import PublishingConformance
from ._settlement import SettlementConformance

__all__ = ["AppConformance", "BrokerConformance", "ConformanceKit", "Member", "SourceConformance"]


class SourceConformance(
    DeliveryConformance, PublishingConformance, SettlementConformance, OrderConformance, LifecycleConformance
):
    """Connections and sources, driven by hand."""


class AppConformance(AppDeliveryConformance, AppFailureConformance, AppRepliesConformance):
    """Handlers in an `App`."""


class BrokerConformance(SourceConformance, AppConformance):
    """All of it."""
