"""What an app opens around its life, and the state that handlers take from it by type."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

__all__ = ["Lifespan", "find_state", "lifespan_mistakes", "may_yield", "open_lifespan", "state_type"]

Lifespan: TypeAlias = "Callable[..., AsyncIterator[Any] | AbstractAsyncContextManager[Any]]"


def lifespan_mistakes(lifespan: object) -> Iterator[tuple[str, str]]:
    """Why `lifespan` cannot be one, as far as can be told before it runs."""
    if lifespan is None:
        return
    name = getattr(lifespan, "__qualname__", repr(lifespan))
    if not callable(lifespan):
        yield "lifespan", f"{name} is not a function; give the function itself, not what it returns"
    elif inspect.iscoroutinefunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        yield "lifespan", f"{name} is not an async generator function: `async def` with one `yield`"
    elif len(_required(lifespan)) > 1:
        yield "lifespan", f"{name} takes more than the app: {', '.join(_required(lifespan))}"


def _required(lifespan: Callable[..., Any]) -> list[str]:
    """The parameters that have to be given: none, or one for the app."""
    try:
        parameters = inspect.signature(lifespan).parameters.values()
    except ValueError:  # no signature to be had
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def state_type(lifespan: Lifespan | None) -> Any:
    """The type that the lifespan says it yields; Any when it does not say, None without a lifespan."""
    if lifespan is None:
        return None
    try:
        returns = typing.get_type_hints(lifespan).get("return")
    except Exception:  # an annotation that cannot be evaluated: found out when it yields
        return Any
    arguments = typing.get_args(returns)
    if not arguments:
        return Any
    return types.NoneType if arguments[0] is None else arguments[0]


def open_lifespan(lifespan: Lifespan, app: object) -> AbstractAsyncContextManager[Any]:
    """Call `lifespan` for `app`. Raises `TypeError` when it gives nothing that can be entered."""
    made: Any = lifespan(app) if _required(lifespan) else lifespan()
    if hasattr(made, "__aenter__"):
        entered: AbstractAsyncContextManager[Any] = made
        return entered
    if hasattr(made, "__anext__"):
        return asynccontextmanager(lambda: made)()
    raise TypeError(f"the lifespan gave {made!r}, neither an async generator nor an async context manager")


def find_state(state: Sequence[object], kind: Any) -> tuple[object | None, str | None]:
    """The one value of `kind` among what the lifespan yielded, or in words why there is none."""
    base = typing.get_origin(kind) or kind
    if not isinstance(base, type):
        return None, f"{kind!r} is no class, so nothing can be found by it"
    try:
        found = [value for value in state if type(value) is base] or [v for v in state if isinstance(v, base)]
    except TypeError as error:  # a protocol that is not runtime_checkable
        return None, str(error)
    if len(found) == 1:
        return found[0], None
    if found:
        return None, f"the lifespan yielded {len(found)} of {kind!r}; give them types of their own"
    return None, f"the lifespan yielded no {kind!r}, but {tuple(type(value).__name__ for value in state)}"


def may_yield(state: Any, kind: Any) -> bool:
    """Whether a lifespan that says it yields `state` may yield a `kind`; what it yields is looked at when it has."""
    parts = typing.get_args(state) if typing.get_origin(state) is tuple else (state,)
    wanted = typing.get_origin(kind) or kind
    return any(part == kind or _may_be(part, wanted) for part in parts)


def _may_be(part: Any, wanted: Any) -> bool:
    if typing.get_origin(part) in (typing.Union, types.UnionType):
        return any(_may_be(one, wanted) for one in typing.get_args(part))
    part = typing.get_origin(part) or part
    if not (isinstance(part, type) and isinstance(wanted, type)) or part is object:
        return part is not Ellipsis  # Any, a type variable: nobody can say yet
    try:
        return issubclass(part, wanted)
    except TypeError:  # a protocol with attributes
        return True
