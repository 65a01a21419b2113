"""``streamfw check``: build an app and say what it subscribes to, what is guaranteed, and who could move elsewhere."""

from __future__ import annotations

import typer

from streamfw.app import App
from streamfw.broker import Broker, Capabilities
from streamfw.build import Built, BuiltSubscriber
from streamfw.config import make_broker, options_for
from streamfw.errors import StreamError, redact
from streamfw.memory import MemoryBroker

from .app_loading import load_app
from .guarantees import guarantees
from .moving import show_moves
from .output import BrokerUrl, console, errors_of, handler_of, reporting, say, show_errors, source_of, table
from .run import AppName

__all__ = ["check"]


@reporting
def check(app: AppName, broker: BrokerUrl = None) -> None:
    """Build an app without running it: its subscribers and what is guaranteed to them, or every mistake (exit code 1).

    With --broker, the app is built on that broker: each subscriber that could not move there is named, and what would
    change for it.
    """
    loaded = load_app(app)
    here = _build(loaded)
    built = here
    if broker is not None:
        loaded.use(broker)
        built = _build(loaded)
        if isinstance(here, Built):
            show_moves(here, built, redact(broker), _broker_at(loaded, broker))
    if not isinstance(built, Built):
        show_errors(built, f"{app} cannot be built; {len(built)} mistake{'s' if len(built) > 1 else ''}:")
        raise typer.Exit(1)
    _show_subscribers(app, built)
    _show_guarantees(built)


def _build(app: App) -> Built | list[Exception]:
    try:
        return app.build()
    except ExceptionGroup as group:
        return errors_of(group)


def _broker_at(app: App, url: str) -> Broker | None:
    """The broker at `url` itself, also where the app cannot be built on it; None where that is why."""
    try:
        return make_broker("brokers.default", url, options_for(url, app.settings.brokers.get("default", {})))
    except (StreamError, ExceptionGroup):
        return None


# -- subscribers


def _show_subscribers(target: str, built: Built) -> None:
    if not built.subscribers:
        say(f"{target} has no subscribers.")
        return
    shown = table(
        "handler", "source", "group", "broker", "workers", "order", "transactional", "attempts", "dead letter",
        title=f"Subscribers of {target}", right=("workers", "attempts"),
    )  # fmt: skip
    for one in built.subscribers:
        declaration, subscription = one.declaration, one.subscription
        shown.add_row(
            handler_of(one),
            source_of(one),
            subscription.group,
            _broker(one.broker, built.brokers[one.broker]),
            str(declaration.workers),
            f"by {declaration.ordered_by}" if declaration.ordered_by else "none",
            "yes" if declaration.transactional else "no",
            "no limit" if declaration.attempts is None else str(declaration.attempts),
            subscription.dead_letter or "none: discarded",
        )
    console().print(shown)


def _broker(name: str, broker: Broker) -> str:
    return broker.describe() if name == "default" else f"{name}: {broker.describe()}"


# -- guarantees


def _show_guarantees(built: Built) -> None:
    groups: dict[tuple[str, Capabilities], list[BuiltSubscriber]] = {}
    for one in built.subscribers:
        groups.setdefault((one.broker, one.capabilities), []).append(one)
    for (name, capabilities), subscribers in groups.items():
        broker = built.brokers[name]
        say(f"\nGuarantees on {_broker(name, broker)} for {', '.join(handler_of(one) for one in subscribers)}", "bold")
        shown = table("", "")
        shown.show_header = False
        for what, words in guarantees(capabilities, isinstance(broker, MemoryBroker), broker.capabilities):
            shown.add_row(what, words)
        console().print(shown)
    for one in built.subscribers:
        if one.subscription.dead_letter is None:
            say(f"{handler_of(one)}: dead_letter=None, so what fails for good is discarded.", "yellow")
