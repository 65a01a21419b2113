"""Which broker a command works on: ``--broker``, else what the configuration calls ``default``."""

from __future__ import annotations

import importlib
from typing import Any

from streamfw.broker import Broker
from streamfw.config import make_broker, options_for, read
from streamfw.memory import MemoryBroker

from .output import CommandError

__all__ = ["broker_of_command", "broker_of_kind", "not_memory"]


def broker_of_command(url: str | None) -> Broker:
    """The broker at `url`, else the configured default. Raises `ConfigError`, `CommandError` when there is none."""
    settings, errors = read()
    if errors:
        raise errors[0]
    configured = settings.brokers.get("default", {})
    if url is None:
        if not configured.get("url"):
            raise CommandError(
                "no broker is configured: give --broker URL, set STREAMFW_BROKERS__DEFAULT__URL, or write "
                "brokers.default.url into streamfw.toml"
            )
        url = str(configured["url"])
    return make_broker("brokers.default", url, options_for(url, configured))


def broker_of_kind(url: str | None, kind: str, example: str) -> tuple[Any, Broker]:
    """`broker_of_command`, which must be the broker of ``streamfw_<kind>``, and that package: it may not be installed.

    `kind` is spelled as its broker's class begins (``Kafka``); `example` is one of its URLs, for the message.
    """
    broker = broker_of_command(url)
    package_name = f"streamfw_{kind.lower()}"
    try:
        package: Any = importlib.import_module(package_name)
    except ImportError as error:
        raise CommandError(
            f"this needs {error.name}; install it with: pip install 'streamfw[{kind.lower()}]'"
        ) from error
    if not isinstance(broker, getattr(package, f"{kind}Broker")):
        raise CommandError(f"{broker.describe()} is not {kind}: name one with --broker {example}")
    return package, broker


def not_memory(broker: Broker, doing: str) -> Broker:
    """`broker`, unless its messages die with this command's own process. `doing` says what is pointless then."""
    if isinstance(broker, MemoryBroker):
        raise CommandError(
            f"{doing} {broker.describe()}: its messages live in one process, and this command's ends at once; name a "
            "broker that processes share with --broker URL"
        )
    return broker
