"""Parameters of a kind that the core does not know: those that a container fills, for example.

An `Injector` says at build which parameters are its own, and wraps the call of those handlers that have any. The others
do not know of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Injected", "Injector"]

Handler: TypeAlias = Callable[..., Awaitable[Any]]
Call: TypeAlias = Callable[[Any, Handler, dict[str, Any]], Awaitable[Any]]


class Injector(Protocol):
    """Fills parameters; `App.inject` takes it."""

    def key(self, parameter: inspect.Parameter, hint: Any, /) -> object | None:
        """At build: what to fill this parameter of a handler with, in words of its own; None: it is not of this kind.
        `hint` is its annotation, with all that stands in it. Raises `LookupError` when it cannot be filled."""
        ...

    async def call(
        self, message: Any, keys: Sequence[Any], handler: Callable[[Sequence[object]], Awaitable[Any]], /
    ) -> Any:
        """Return what `handler` returns for the values of `keys`, within whatever they live in. `message` is a
        `Message`, or the `MessageBatch` of a batch handler. What this raises is a failure of the message."""
        ...


class Injected:
    """The parameters of one handler that injectors fill."""

    def __init__(self, injectors: Sequence[Injector]) -> None:
        self._found: list[tuple[Injector, dict[str, object]]] = [(injector, {}) for injector in injectors]

    def __bool__(self) -> bool:
        return any(keys for _, keys in self._found)

    def take(self, parameter: inspect.Parameter, hint: Any) -> bool:
        """Whether one of the injectors fills this parameter. Raises its `LookupError`."""
        for injector, keys in self._found:
            key = injector.key(parameter, hint)
            if key is not None:
                keys[parameter.name] = key
                return True
        return False

    def compose(self) -> Call:
        """A function that calls a handler with its other arguments and with what is injected."""
        call: Call = _call
        for injector, keys in self._found:
            if keys:
                call = _within(injector, tuple(keys), tuple(keys.values()), call)
        return call


def _call(message: Any, handler: Handler, arguments: dict[str, Any]) -> Awaitable[Any]:
    return handler(**arguments)


def _within(injector: Injector, names: tuple[str, ...], keys: tuple[object, ...], inner: Call) -> Call:
    def call(message: Any, handler: Handler, arguments: dict[str, Any]) -> Awaitable[Any]:
        def with_values(values: Sequence[object]) -> Awaitable[Any]:
            return inner(message, handler, arguments | dict(zip(names, values, strict=True)))

        return injector.call(message, keys, with_values)

    return call
