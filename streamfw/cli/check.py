"""``streamfw check``: build an app and say what it subscribes to, what is guaranteed, and who could move elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from streamfw.app import App
from streamfw.broker import Broker, Capabilities
from streamfw.build import Built, BuiltSubscriber
from streamfw.errors import BuildError, redact
from streamfw.memory import MemoryBroker

from .app_loading import load_app
from .output import BrokerUrl, console, errors_of, reporting, say, show_errors, table
from .run import AppName

__all__ = ["check", "guarantees"]


@reporting
def check(app: AppName, broker: BrokerUrl = None) -> None:
    """Build an app without running it: its subscribers and what is guaranteed to them, or every mistake (exit code 1).

    With --broker, the app is built on that broker, and each subscriber that could not move there is named.
    """
    loaded = load_app(app)
    here = _build(loaded)
    built = here
    if broker is not None:
        loaded.use(broker)
        built = _build(loaded)
        if isinstance(here, Built):
            _show_moves(here, built, redact(broker))
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


# -- subscribers


def _show_subscribers(target: str, built: Built) -> None:
    if not built.subscribers:
        say(f"{target} has no subscribers.")
        return
    shown = table(
        "handler", "source", "group", "broker", "workers", "order", "attempts", "dead letter",
        title=f"Subscribers of {target}", right=("workers", "attempts"),
    )  # fmt: skip
    for one in built.subscribers:
        declaration, subscription = one.declaration, one.subscription
        shown.add_row(
            _handler(one),
            _source(one),
            subscription.group,
            _broker(one.broker, built.brokers[one.broker]),
            str(declaration.workers),
            f"by {declaration.ordered_by}" if declaration.ordered_by else "none",
            "no limit" if declaration.attempts is None else str(declaration.attempts),
            subscription.dead_letter or "none: discarded",
        )
    console().print(shown)


def _handler(one: BuiltSubscriber) -> str:
    return str(getattr(one.declaration.handler, "__qualname__", one.declaration.handler))


def _source(one: BuiltSubscriber) -> str:
    source = one.declaration.source
    return source if isinstance(source, str) else repr(source)


def _broker(name: str, broker: Broker) -> str:
    return broker.describe() if name == "default" else f"{name}: {broker.describe()}"


# -- guarantees


def _show_guarantees(built: Built) -> None:
    groups: dict[tuple[str, Capabilities], list[BuiltSubscriber]] = {}
    for one in built.subscribers:
        groups.setdefault((one.broker, one.capabilities), []).append(one)
    for (name, capabilities), subscribers in groups.items():
        broker = built.brokers[name]
        say(f"\nGuarantees on {_broker(name, broker)} for {', '.join(_handler(one) for one in subscribers)}", "bold")
        shown = table("", "")
        shown.show_header = False
        for what, words in guarantees(capabilities, isinstance(broker, MemoryBroker)):
            shown.add_row(what, words)
        console().print(shown)
    for one in built.subscribers:
        if one.subscription.dead_letter is None:
            say(f"{_handler(one)}: dead_letter=None, so what fails for good is discarded.", "yellow")


_SETTLEMENT = {
    "immediate": "at once: an outcome is durable when it is settled",
    "grouped": "in groups: outcomes are durable when the claim that took their messages ends",
    "positional": "by position: an outcome is durable when the position behind it is committed; after a crash, what "
    "was done beyond the committed position is done again",
    "sent": "sent: an outcome is on its way when it is settled; if the connection breaks then, the message comes again",
}


def guarantees(capabilities: Capabilities, in_memory: bool = False) -> Sequence[tuple[str, str]]:
    """What a broker's capabilities mean, as pairs of a subject and plain words.

    `in_memory`: its messages live in the process, which no capability says.
    """
    survives = (
        "at least once while the process lives; messages are in memory and die with it"
        if in_memory
        else "at least once: a message whose handler did not finish is delivered again, also after a crash"
    )
    return (
        ("delivery", survives),
        ("settlement", "at once, in memory" if in_memory else _SETTLEMENT[capabilities.settlement]),
        ("retries", _retries(capabilities)),
        ("delays", _delays(capabilities.delay)),
        (
            "attempts",
            "counted by the broker: a crash does not start the count again"
            if capabilities.attempts == "durable"
            else "counted in this process: a crash starts the count again",
        ),
        (
            "dead letters",
            "moved by the broker in one step"
            if capabilities.dead_letter
            else "published and confirmed first, then the original is settled: a crash in between leaves both",
        ),
        ("order", _order(capabilities)),
        (
            "transactions",
            "yes: with transactional=True the handler's writes and the end of its message are one"
            if capabilities.transactions
            else "none",
        ),
        (
            "first publish",
            "what is published before any group subscribed is kept for the first one"
            if capabilities.kept
            else "what is published before any group subscribed is refused (Unroutable)",
        ),
        (
            "largest body",
            "no limit of the broker's own"
            if capabilities.max_body is None
            else f"{capabilities.max_body:,} bytes; a larger one is refused",
        ),
    )


def _retries(capabilities: Capabilities) -> str:
    if capabilities.retry:
        return "given back to the broker: any process of the group may do the next attempt"
    return "kept in this process for their pause; a crash meanwhile makes them come at once"


def _delays(granularity: float | None) -> str:
    if granularity is None:
        return "no delayed publishing"
    unit = f"{granularity * 1000:g} ms" if granularity < 1 else f"{granularity:g} s"
    return f"never early, and late by about {unit} at most while the consumers keep up"


def _order(capabilities: Capabilities) -> str:
    if not capabilities.ordered_by:
        return "none over the processes of a group"
    orders = " or ".join(sorted(capabilities.ordered_by))
    return f"over all processes of a group, by {orders}, where ordered_by= asks for it"


# -- moving


def _show_moves(here: Built, there: Built | list[Exception], url: str) -> None:
    """Which subscribers of the app as configured could run on the broker at `url` (which holds no password)."""
    errors = [] if isinstance(there, Built) else there
    elsewhere = [error for error in errors if not isinstance(error, BuildError)]
    shown = table("handler", "source", "could move", "why", title=f"Moving to {url}")
    for one in here.subscribers:
        where = one.declaration.where
        against = [_reason(error, where) for error in errors if _stands_at(error, where)]
        if one.broker != "default":
            shown.add_row(_handler(one), _source(one), "stays", f"is on broker {one.broker!r}, not the default")
        elif against:
            if not isinstance(one.declaration.source, str):
                against.append("a source object is one broker's own; a plain name moves")
            shown.add_row(_handler(one), _source(one), "no", "; ".join(against))
        elif elsewhere:
            shown.add_row(_handler(one), _source(one), "unknown", "that broker cannot be made")
        else:
            shown.add_row(_handler(one), _source(one), "yes", "")
    console().print(shown)


def _stands_at(error: Exception, where: str) -> bool:
    return isinstance(error, BuildError) and (error.where == where or error.where.startswith(f"{where}, "))


def _reason(error: Exception, where: str) -> str:
    return str(error).removeprefix(where).lstrip(":, ")
