"""An app on other brokers for a while, and then as it was."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, get_args, get_origin

import msgspec

from streamfw.app import App
from streamfw.broker import Broker, Connection
from streamfw.build import Built, BuiltSubscriber
from streamfw.config import Settings
from streamfw.errors import BuildError, ConfigError, NotRunning
from streamfw.handler import DeliveryField
from streamfw.lifespan import find_state
from streamfw.memory import MemoryDelivery
from streamfw.publisher import Publisher

__all__ = ["StateGiven", "bind_state", "lent", "not_in_memory"]

StateGiven = Sequence[object] | Mapping[Any, object]

# What of an app is set for the while. By name: an app shows none of it to anybody else.
SET = ("_brokers", "_built", "_lifespan", "_settings", "_on_connect")


@contextmanager
def lent(
    app: App,
    brokers: Callable[[Iterable[str]], Mapping[str, Broker]] | None,
    state: StateGiven | None,
    on_connect: Callable[[str, Connection], None],
    *,
    drain_timeout: float,
    wait: float,
) -> Generator[None, None, None]:
    """Within the context `app` has the brokers that `brokers` makes of the names of its own (None: its own) and this
    state instead of a lifespan's; it is to be built anew. `drain_timeout` and `wait` are at most so many seconds."""
    if getattr(app, "_life") is not None or getattr(app, "_on_connect") is not None:  # noqa: B009
        raise NotRunning("the app runs already, or is in a TestApp: a TestApp needs it for itself")
    saved = {name: getattr(app, name) for name in SET}
    publishers = [
        (publisher, slot, getattr(publisher, slot)) for publisher in _publishers(app) for slot in Publisher.__slots__
    ]
    try:
        instead: dict[str, object] = {"_built": None, "_on_connect": on_connect}
        settings = _settings_of(app)
        instead["_settings"] = msgspec.structs.replace(
            settings,
            drain_timeout=min(settings.drain_timeout, drain_timeout),
            wait=wait if settings.wait is None else min(settings.wait, wait),
        )
        if brokers is not None:
            instead["_brokers"] = brokers(dict.fromkeys(["default", *settings.brokers, *saved["_brokers"]]))
        elif saved["_built"] is not None:
            instead["_brokers"] = dict(saved["_built"].brokers)  # themselves, not others of the same URL
        if state is not None:
            instead["_lifespan"] = _lifespan_of(state)
        for name, value in instead.items():
            setattr(app, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(app, name, value)
        for publisher, slot, value in publishers:
            setattr(publisher, slot, value)


def _settings_of(app: App) -> Settings:
    try:
        return app.settings
    except ConfigError:
        app.build()  # tells all mistakes at once
        raise


def _publishers(app: App) -> list[Publisher[Any]]:
    given: list[object] = getattr(app, "_publishers")  # noqa: B009
    return [one for one in given if isinstance(one, Publisher)]  # `App.build` objects to others


def _lifespan_of(state: StateGiven) -> Callable[[], AsyncIterator[Any]]:
    values = tuple(state.values() if isinstance(state, Mapping) else state)

    async def lifespan() -> AsyncIterator[Any]:
        yield values

    return lifespan


def bind_state(built: Built, state: StateGiven) -> None:
    """Give handlers the test's own state: of a mapping what stands under the parameter's type, otherwise by type.

    Raises an `ExceptionGroup` of `BuildError` where something is missing.
    """
    errors: list[BuildError] = []
    for one in built.subscribers:
        for parameter, kind in one.compiled.states.items():
            if isinstance(state, Mapping):
                value, mistake = state.get(kind), None if kind in state else f"state= has nothing under {kind!r}"
            else:
                value, mistake = find_state(tuple(state), kind)
                if mistake is not None:
                    name = getattr(kind, "__name__", repr(kind))
                    mistake += f"; for a fake of another type, say which it stands for: state={{{name}: the fake}}"
            if mistake is None:
                one.compiled.bind(parameter, value)
            else:
                errors.append(BuildError(one.declaration.where, f"parameter {parameter!r}: {mistake}"))
        one.compiled.states = {}
    if errors:
        raise ExceptionGroup("the state given to TestApp is not what handlers take", errors)


def not_in_memory(built: Sequence[BuiltSubscriber]) -> None:
    """Raises an `ExceptionGroup` of `BuildError` for parameters that only another broker's deliveries can fill."""
    errors = [
        BuildError(
            one.declaration.where,
            f"parameter {parameter!r} takes the delivery's {field!r}, which there is none of in memory: give it a "
            "default, use TestApp(app, live=True), or call the handler as the plain function that it is",
        )
        for one in built
        for parameter, field in _fields(one)
        if not hasattr(MemoryDelivery, field)
    ]
    if errors:
        raise ExceptionGroup("memory cannot stand in for the broker of these handlers", errors)


def _fields(one: BuiltSubscriber) -> Iterator[tuple[str, str]]:
    """Parameters without a default that are marked with a `DeliveryField`, and the field's name."""
    given = inspect.signature(one.declaration.handler).parameters
    for parameter, hint in typing.get_type_hints(one.declaration.handler, include_extras=True).items():
        if parameter not in given or given[parameter].default is not inspect.Parameter.empty:
            continue
        for marker in _markers(hint):
            if isinstance(marker, DeliveryField):
                yield parameter, marker.field


def _markers(hint: Any) -> Iterator[object]:
    if get_origin(hint) is Annotated:
        yield from get_args(hint)[1:]
    else:  # a union may have one inside
        for part in get_args(hint):
            yield from _markers(part)
