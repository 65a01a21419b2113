"""Which broker a command works on: ``--broker``, else what the configuration calls ``default``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamfw.app import App
from streamfw.broker import Broker
from streamfw.config import load, make_broker, schemes
from streamfw.errors import ConfigError
from streamfw.memory import MemoryBroker

from .output import CommandError

__all__ = ["broker_of_command", "not_memory", "use_broker"]


def broker_of_command(url: str | None) -> Broker:
    """The broker at `url`, else the configured default. Raises `ConfigError`, `CommandError` when there is none."""
    configured = load().brokers.get("default", {})
    if url is None:
        if not configured:
            raise CommandError(
                "no broker is configured: give --broker URL, set STREAMFW_BROKERS__DEFAULT__URL, or write "
                "brokers.default.url into streamfw.toml"
            )
        url = str(configured["url"])
    return make_broker("brokers.default", url, _options_for(url, configured))


def not_memory(broker: Broker, doing: str) -> Broker:
    """`broker`, unless its messages die with this command's own process. `doing` says what is pointless then."""
    if isinstance(broker, MemoryBroker):
        raise CommandError(
            f"{doing} {broker.describe()}: its messages live in one process, and this command's ends at once; name a "
            "broker that processes share with --broker URL"
        )
    return broker


def use_broker(app: App, url: str) -> None:
    """Let the app's default broker be the one at `url`.

    The options that are configured for it stay when they are for the same kind of broker; another kind has others.
    What is wrong with `url` is left for `App.build` to tell with the rest.
    """
    try:
        configured = app.settings.brokers.get("default", {})
        if len(configured) > 1 and not _options_for(url, configured):
            app.use(make_broker("brokers.default", url))
            return
    except ConfigError:
        pass
    app.use(url)


def _options_for(url: str, configured: Mapping[str, Any]) -> dict[str, Any]:
    installed = schemes()

    def kind(address: str) -> str | None:
        point = installed.get(address.partition("://")[0])
        return None if point is None else str(point.value)

    if kind(url) != kind(str(configured.get("url", ""))):
        return {}
    return {option: value for option, value in configured.items() if option != "url"}
