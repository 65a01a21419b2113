"""Where a handler runs, and what it may take there.

    async def                      in the event loop
    def                            in a thread
    def, run_in="process"          in a process of its own

What of it can be told before anything runs is told here, as sentences for `App.build`.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .message import Message
from .publisher import Publisher
from .sync_publisher import SyncPublisher

if TYPE_CHECKING:
    from .codec import Codec
    from .config import Settings
    from .subscriber import Declaration

__all__ = [
    "Place",
    "RunIn",
    "import_mistake",
    "is_async",
    "offload_mistakes",
    "parameter_mistake",
    "place_of",
    "placement_mistakes",
    "plain",
]

RunIn: TypeAlias = Literal["thread", "process"]
Place: TypeAlias = Literal["loop", "thread", "process"]


def is_async(handler: Callable[..., Any]) -> bool:
    """Whether calling `handler` gives a coroutine, as far as can be told without calling it."""
    own_call = getattr(type(handler), "__call__", None)  # noqa: B004 - not whether there is one, but of which kind
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(own_call)


def place_of(handler: Callable[..., Any], run_in: object) -> Place:
    """Where `handler` runs. A declaration that contradicts itself has a place too, and mistakes."""
    if is_async(handler):
        return "loop"
    return "process" if run_in == "process" else "thread"


def offload_mistakes(given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What is wrong with an app's own options about threads, processes and the watchdog."""
    for option in ("threads", "processes"):
        most = given.get(option, 1)
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            yield option, f"{most!r} is not a whole number above zero"
    seconds = given.get("watchdog")
    if seconds is not None and (not isinstance(seconds, int | float) or not 0 <= seconds < 10**9):
        yield "watchdog", f"{seconds!r} is no number of seconds"


def placement_mistakes(d: Declaration, codec: Codec, settings: Settings) -> Iterator[str]:
    """What is wrong with where the handler of `d` is to run."""
    place = place_of(d.handler, d.run_in)
    if place == "loop":
        if d.run_in is not None:
            yield f"run_in={d.run_in!r} is for a `def` function; this one is `async def`, and runs in the event loop"
        return
    yield from _no_plain_function(d.handler)
    if d.transactional:
        yield (
            "transactional=True needs an `async def` handler: the transaction's connection belongs to the event loop, "
            f"and a `def` handler runs in a {place}"
        )
    limit = settings.threads if place == "thread" else settings.processes
    if isinstance(limit, int) and isinstance(d.workers, int) and d.workers > limit:
        option = "threads" if place == "thread" else "processes"
        yield (
            f"workers: {d.workers} are more than the {limit} {option} that the app may have: raise {option}= of the "
            f"App (or `{option}` in the configuration), or ask for fewer workers"
        )
    if place == "process":
        yield from _process_mistakes(d.handler, codec)


def _no_plain_function(handler: Callable[..., Any]) -> Iterator[str]:
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        yield "a handler is an `async def` function or a plain `def`; this one is a generator, and would never run"
    elif is_async(inspect.unwrap(handler)):
        yield (
            "it is a plain function around an `async def` one, so nobody would await that: let the decorator's own "
            "function be `async def`"
        )


def _process_mistakes(handler: Callable[..., Any], codec: Codec) -> Iterator[str]:
    if sys.platform == "win32":
        yield 'run_in="process": not on Windows'
    if (mistake := import_mistake(handler)) is not None:
        yield f'run_in="process": a process finds its handler by importing it, and {mistake}'
    try:
        pickle.dumps(codec)
    except Exception as error:  # whatever pickling somebody's object raises
        yield f'run_in="process": the body is decoded there, and the codec cannot be pickled: {error}'


def import_mistake(handler: Callable[..., Any]) -> str | None:
    """Why another process cannot import `handler`; None when it can."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    if not module or not name:
        return f"{handler!r} has no name to import"
    if "<lambda>" in name:
        return "a lambda has no name to import: write a function at module level"
    if "<locals>" in name:
        return f"{name} is defined inside a function: move it to module level"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not handler:
        return f"{module}.{name} is something else (a decorator above @subscriber, or a method?)"
    if module == "__main__" and not _main_can_be_imported():
        return f"{name} is defined in an interactive session or a package's __main__: move it to a module"
    return None


def _main_can_be_imported() -> bool:
    main = sys.modules["__main__"]
    spec: object = getattr(main, "__spec__", None)
    if spec is None:
        return getattr(main, "__file__", None) is not None
    return not f".{getattr(spec, 'name', '')}".endswith(".__main__")


def parameter_mistake(place: Place, name: str, kind: type, what: str) -> str | None:
    """Why a handler in `place` cannot take the parameter `name`. `what` is what it takes: "publisher", "transaction",
    "state", "injected" or "message"."""
    if what == "publisher":
        return _publisher_mistake(place, name, kind)
    if what == "transaction" and place != "loop":
        return (
            f"parameter {name!r}: a transaction's connection belongs to the event loop; a handler that takes it is "
            "`async def`"
        )
    if what == "injected" and place == "process":
        return (
            f"parameter {name!r}: what is injected stays in the app's own process; let the handler's module open what "
            "it needs"
        )
    if what == "state" and place == "process":
        return (
            f"parameter {name!r}: what the lifespan yielded stays in the app's own process; let the handler's module "
            "open what it needs"
        )
    return None


def _publisher_mistake(place: Place, name: str, kind: type) -> str | None:
    if place == "process":
        return f"parameter {name!r}: a handler in a process cannot publish; let it return the value, and say publishes="
    if place == "thread" and issubclass(kind, Publisher):
        return f"parameter {name!r}: a `def` handler cannot await a Publisher; take a SyncPublisher"
    if place == "loop" and issubclass(kind, SyncPublisher):
        return (
            f"parameter {name!r}: a SyncPublisher would block the event loop; an `async def` handler takes a Publisher"
        )
    return None


def plain(message: Message) -> Message:
    """`message` without what its broker keeps with it: what can go to another process."""
    return Message(
        name=message.name,
        body=message.body,
        message_id=message.message_id,
        key=message.key,
        attempt=message.attempt,
        timestamp=message.timestamp,
        raw_headers=message.headers,
    )
