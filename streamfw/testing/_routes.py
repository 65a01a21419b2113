"""Which of an app's subscriptions a message reaches, by its name and by the routes of source objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from streamfw.broker import Route, Routed, Subscription
from streamfw.errors import Unsupported
from streamfw.message import Headers

__all__ = ["Routes"]


class Routes:
    """See `streamfw.broker.Routed`, which says what a name means."""

    def __init__(self) -> None:
        self._plain: dict[str, list[Subscription]] = defaultdict(list)
        self._routed: list[tuple[Subscription, Routed]] = []
        # By name, as far as it was asked: whom it leads to, under which condition.
        self._led: dict[str, list[tuple[Subscription, Route]]] = {}

    def add(self, subscription: Subscription) -> None:
        """From now on it may be reached."""
        source = subscription.source
        self._led.clear()
        if isinstance(source, Routed):
            self._routed.append((subscription, source))
        else:
            self._plain[subscription.name].append(subscription)

    def reached(self, name: str, key: str | None, headers: Headers) -> Sequence[Subscription]:
        """Whom a message reaches that is published to `name`."""
        led = self._led.get(name)
        if led is None:
            led = self._led[name] = self._find(name)
        return [subscription for subscription, route in led if route(key, headers)]

    def _find(self, name: str) -> list[tuple[Subscription, Route]]:
        found: list[tuple[Subscription, Route]] = [(plain, _any) for plain in self._plain.get(name, ())]
        for subscription, source in self._routed:
            with suppress(Unsupported):  # only its server knows
                if name != subscription.dead_letter and (route := source.route(name)) is not None:
                    found.append((subscription, route))
        return found or [(subscription, _any) for subscription, _ in self._routed if subscription.name == name]


def _any(key: str | None, headers: Headers) -> bool:
    return True
