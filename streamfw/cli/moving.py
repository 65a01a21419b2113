"""Which subscribers of an app could run on another broker, and what would change for them there."""

from __future__ import annotations

from collections.abc import Sequence

from streamfw.broker import Broker
from streamfw.build import Built, BuiltSubscriber
from streamfw.errors import BuildError
from streamfw.memory import MemoryBroker

from .guarantees import guarantees
from .output import console, handler_of, say, source_of, table

__all__ = ["show_moves"]

Changes = tuple[tuple[str, str, str], ...]


def show_moves(here: Built, there: Built | list[Exception], url: str, broker: Broker | None) -> None:
    """Say which subscribers of the app as configured could run on `broker`, at `url` (which holds no password).

    `there`: the app built on it, or why it cannot be. `broker` is None where it cannot be made.
    """
    errors = [] if isinstance(there, Built) else there
    elsewhere = [error for error in errors if not isinstance(error, BuildError)]
    shown = table("handler", "source", "could move", "why", title=f"Moving to {url}")
    for one in here.subscribers:
        shown.add_row(handler_of(one), source_of(one), *_could_move(one, errors, bool(elsewhere)))
    console().print(shown)
    if broker is not None:
        _show_changes(here, broker, url)


def _could_move(one: BuiltSubscriber, errors: Sequence[Exception], unknown: bool) -> tuple[str, str]:
    where = one.declaration.where
    against = [_reason(error, where) for error in errors if _stands_at(error, where)]
    if one.broker != "default":
        return "stays", f"is on broker {one.broker!r}, not the default"
    if against:
        if not isinstance(one.declaration.source, str):
            against.append("a source object is one broker's own; a plain name moves")
        return "no", "; ".join(against)
    return ("unknown", "that broker cannot be made") if unknown else ("yes", "")


def _stands_at(error: Exception, where: str) -> bool:
    return isinstance(error, BuildError) and (error.where == where or error.where.startswith(f"{where}, "))


def _reason(error: Exception, where: str) -> str:
    return str(error).removeprefix(where).lstrip(":, ")


# -- what would change


def _show_changes(here: Built, there: Broker, url: str) -> None:
    groups: dict[Changes, list[str]] = {}
    for one in here.subscribers:
        if one.broker == "default" and isinstance(one.declaration.source, str):
            groups.setdefault(_changes(one, here.brokers["default"], there), []).append(handler_of(one))
    for changes, handlers in groups.items():
        if not changes:
            say(f"\nNothing would change for {', '.join(handlers)}.")
            continue
        say(f"\nWhat would change for {', '.join(handlers)}", "bold")
        shown = table("", f"on {here.brokers['default'].describe()}", f"on {url}")
        for change in changes:
            shown.add_row(*change)
        console().print(shown)


def _changes(one: BuiltSubscriber, here: Broker, there: Broker) -> Changes:
    """What is guaranteed otherwise, as it is here and as it would be there."""
    after = there.capabilities_of(one.subscription)
    pairs = zip(
        guarantees(one.capabilities, isinstance(here, MemoryBroker), here.capabilities),
        guarantees(after, isinstance(there, MemoryBroker), there.capabilities),
        strict=True,
    )
    changed = {what: (now, then) for (what, now), (_, then) in pairs if now != then}
    order, transactional = one.declaration.ordered_by, one.declaration.transactional
    # What a subscriber does not ask for it does not lose.
    if order is None or order in after.ordered_by:
        changed.pop("order", None)
    elif "order" in changed:
        changed["order"] = (changed["order"][0], f"lost: messages of one {order} could overtake each other")
    if not transactional:
        changed.pop("transactions", None)
    elif "transactions" in changed:
        lost = "lost: a crash between the handler's commit and the end of its message would do the work twice"
        changed["transactions"] = (changed["transactions"][0], lost)
    return tuple((what, now, then) for what, (now, then) in changed.items())
