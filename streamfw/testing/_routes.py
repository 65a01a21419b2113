"""Which of an app's subscriptions a message reaches, by its name and by the routes of source objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from streamfw.broker import Route, Routed, Subscription
from streamfw.errors import Unsupported
from streamfw.message import Headers

__all__ = ["Routes"]


class Routes:
    """See `streamfw.broker.Routed`, which says what a name means."""

    def __init__(self) -> None:
        # By name: whom it leads to, under which condition (None: under any).
        self._led: dict[str, list[tuple[Subscription, Route | None]]] = defaultdict(list)
        # Those that have routes, by their own name, which holds where it leads nowhere.
        self._own: dict[str, list[Subscription]] = defaultdict(list)

    def add(self, subscription: Subscription) -> None:
        """From now on it may be reached."""
        source = subscription.source
        if not isinstance(source, Routed):
            self._led[subscription.name].append((subscription, None))
            return
        self._own[subscription.name].append(subscription)
        try:
            routes = source.routes()
        except Unsupported:  # only its server knows
            return
        for name, route in routes.items():
            self._led[name].append((subscription, route))

    def reached(self, name: str, key: str | None, headers: Headers) -> Sequence[Subscription]:
        """Whom a message reaches that is published to `name`."""
        led = self._led.get(name)
        if led is None:
            return self._own.get(name, ())
        return [subscription for subscription, route in led if route is None or route(key, headers)]
