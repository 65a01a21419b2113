"""Routers: subscribers declared apart from the app, with a prefix and options in common.

    billing = Router("billing.", attempts=5, middleware=[audit])

    @billing.subscriber("invoices")          # handles "billing.invoices"
    async def issue(invoice: Invoice) -> None: ...

    app = App(ship, billing)

A router may include others; prefixes and middleware add up from the outside in, an inner option wins over an outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

import msgspec

from .subscriber import Declaration, Options, declare

__all__ = ["Router"]

F = TypeVar("F", bound=Callable[..., Any])


class Router:
    """A set of subscribers. `prefix` is put before every name they subscribe to; the options are those of `subscriber`.

    What handlers publish to (``publishes=``, a `Publisher`) is not prefixed: it is somebody else's name.
    """

    def __init__(self, prefix: str = "", **options: Unpack[Options]) -> None:
        self.prefix = prefix
        self._options: dict[str, Any] = dict(options)
        self._marked: list[tuple[Callable[..., Any], object, dict[str, Any]]] = []
        self._included: list[Router] = []

    def subscriber(self, source: str | object, /, **options: Unpack[Options]) -> Callable[[F], F]:
        """Mark a function as this router's handler of `source`. See `streamfw.subscriber` for the options."""

        def mark(handler: F) -> F:
            self._marked.append((handler, source, dict(options)))
            return handler

        return mark

    def include(self, *routers: Router) -> None:
        """Let the subscribers of `routers` be this one's, too. Raises `ValueError` where that would be a circle."""
        for router in routers:
            if router is self or router.reaches(self):
                raise ValueError(f"{router!r} includes {self!r} already: routers cannot contain each other")
            self._included.append(router)

    def reaches(self, other: Router) -> bool:
        """Whether `other` is included here, at whatever depth."""
        return any(router is other or router.reaches(other) for router in self._included)

    def declarations(self, prefix: str = "", options: Mapping[str, Any] | None = None) -> list[Declaration]:
        """Everything that is declared here and in what it includes, with what comes from outside."""
        prefix, shared = prefix + self.prefix, _joined(options or {}, self._options)
        found = [
            declare(handler, _named(source, prefix), _joined(shared, own)) for handler, source, own in self._marked
        ]
        for router in self._included:
            found.extend(router.declarations(prefix, shared))
        return found

    def __repr__(self) -> str:
        return f"Router({self.prefix!r})"


def _joined(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**outer, **inner}
    if outer.get("middleware") and inner.get("middleware"):
        joined["middleware"] = [*outer["middleware"], *inner["middleware"]]
    return joined


def _named(source: object, prefix: str) -> object:
    """`source` under its prefixed name; a source object that has no name is left for the build to object to."""
    if isinstance(source, str):
        return prefix + source
    name = getattr(source, "name", None)
    if prefix and isinstance(source, msgspec.Struct) and isinstance(name, str):
        return msgspec.structs.replace(source, name=prefix + name)
    return source
