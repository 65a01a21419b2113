"""What a build finds wrong with where handlers are to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import msgspec
import pytest

from streamfw import App, MessageBatch, Publisher, Router, State, SyncPublisher, UnitConnection, subscriber
from streamfw.placement import is_async, place_of
from tests.unit import blocking_handlers


class Order(msgspec.Struct):
    id: int


class Pool: ...


class Unpicklable:
    content_type: str | None = None

    def __init__(self) -> None:
        self.lock = lambda: None

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        return msgspec.json.Decoder(annotation).decode

    def encode(self, value: Any) -> bytes:
        return msgspec.json.encode(value)


async def asynchronous(order: Order) -> None: ...
def blocks(order: Order) -> None: ...
def generates(order: Order) -> Iterator[int]:
    yield 1


async def generates_too(order: Order) -> AsyncIterator[int]:
    yield 1


@functools.wraps(asynchronous)
def wrapped(order: Order) -> Any:
    return asynchronous(order)


def with_publisher(order: Order, out: Annotated[Publisher[Order], "out"]) -> None: ...
def with_sync_publisher(order: Order, out: Annotated[SyncPublisher[Order], "out"]) -> None: ...
async def loop_with_sync_publisher(order: Order, out: Annotated[SyncPublisher[Order], "out"]) -> None: ...
def unbound_publisher(order: Order, out: SyncPublisher[Order]) -> None: ...
def with_transaction(order: Order, unit: Annotated[object, UnitConnection]) -> None: ...
def with_maybe_a_transaction(order: Order, unit: Annotated[object | None, UnitConnection]) -> None: ...
def with_state(order: Order, pool: Annotated[Pool, State]) -> None: ...


a_lambda = lambda order: None  # noqa: E731
renamed = blocks


def blocks_too(order: Order) -> None: ...


blocked = blocks_too
blocks_too = functools.cache(blocks_too)


class Methods:
    def handle(self, order: Order) -> None: ...


async def lifespan() -> AsyncIterator[Pool]:
    yield Pool()


def mistakes(handler: Any, app: dict[str, Any] | None = None, **options: Any) -> list[str]:
    """What is wrong with `handler` as a subscriber with these options."""
    router = Router()
    router.subscriber("orders", **options)(handler)
    try:
        App(router, lifespan=lifespan, **(app or {})).build()
    except ExceptionGroup as errors:
        return [str(error) for error in errors.exceptions]
    return []


def local() -> Callable[[Order], None]:
    def inside(order: Order) -> None: ...

    return inside


PROCESS = {"run_in": "process"}
IMPORTS = 'run_in="process": a process finds its handler by importing it, and '


@pytest.mark.parametrize(
    ("handler", "options", "text"),
    [
        (blocks, {"run_in": "fork"}, 'run_in: \'fork\' is neither "thread" nor "process"'),
        (asynchronous, PROCESS, "run_in='process' is for a `def` function; this one is `async def`"),
        (asynchronous, {"run_in": "thread"}, "run_in='thread' is for a `def` function; this one is `async def`"),
        (generates, {}, "a handler is an `async def` function or a plain `def`; this one is a generator"),
        (generates_too, {}, "a handler is an `async def` function or a plain `def`; this one is a generator"),
        (wrapped, {}, "it is a plain function around an `async def` one"),
        (blocks, {"workers": 41}, "workers: 41 are more than the 40 threads that the app may have: raise threads="),
        (with_publisher, {}, "parameter 'out': a `def` handler cannot await a Publisher; take a SyncPublisher"),
        (loop_with_sync_publisher, {}, "parameter 'out': a SyncPublisher would block the event loop"),
        (unbound_publisher, {}, "parameter 'out' is an unbound publisher"),
        (with_maybe_a_transaction, {}, "parameter 'unit': a transaction's connection belongs to the event loop"),
        (blocking_handlers.everything, {**PROCESS, "codec": Unpicklable()}, "the codec cannot be pickled"),
        (a_lambda, PROCESS, f"{IMPORTS}a lambda has no name to import"),
        (local(), PROCESS, f"{IMPORTS}local.<locals>.inside is defined inside a function: move it to module level"),
        (blocked, PROCESS, f"{IMPORTS}tests.unit.test_blocking_build.blocks_too is something else"),
        (Methods().handle, PROCESS, f"{IMPORTS}tests.unit.test_blocking_build.Methods.handle is something else"),
        (with_sync_publisher, PROCESS, "parameter 'out': a handler in a process cannot publish; let it return"),
        (with_publisher, PROCESS, "parameter 'out': a handler in a process cannot publish; let it return"),
        (with_state, PROCESS, "parameter 'pool': what the lifespan yielded stays in the app's own process"),
    ],
)
def test_one_mistake(handler: Any, options: dict[str, Any], text: str) -> None:
    found = mistakes(handler, **options)
    assert len([one for one in found if text in one]) == 1, found
    others = [one for one in found if text not in one]
    assert all("a_lambda" in one or "no annotation" in one for one in others), found


def test_a_transaction_and_a_def_handler() -> None:
    found = mistakes(blocks, transactional=True)
    assert any("transactional=True needs an `async def` handler" in one and "runs in a thread" in one for one in found)
    found = mistakes(with_transaction, transactional=True, run_in="process")
    assert any("runs in a process" in one for one in found)
    assert any("parameter 'unit': a transaction's connection belongs to the event loop" in one for one in found)


def test_more_workers_than_processes() -> None:
    found = mistakes(blocks, {"processes": 2}, run_in="process", workers=3)
    assert any("workers: 3 are more than the 2 processes" in one for one in found)
    assert mistakes(blocks, {"processes": 3}, run_in="process", workers=3) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"threads": 0}, "threads: 0 is not a whole number above zero"),
        ({"threads": True}, "threads: True is not a whole number above zero"),
        ({"processes": "2"}, "processes: '2' is not a whole number above zero"),
        ({"watchdog": -1}, "watchdog: -1 is no number of seconds"),
        ({"watchdog": "1"}, "watchdog: '1' is no number of seconds"),
    ],
)
def test_the_apps_own_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        App(**options).build()
    assert text in [str(error) for error in caught.value.exceptions]


def test_the_configuration_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMFW_THREADS", "7")
    monkeypatch.setenv("STREAMFW_WATCHDOG", "0")
    settings = App().settings
    assert (settings.threads, settings.processes, settings.watchdog) == (7, None, 0.0)
    settings = App(threads=8, processes=2, watchdog=None).settings
    assert (settings.threads, settings.processes, settings.watchdog) == (8, 2, None)
    monkeypatch.setenv("STREAMFW_THREADS", "0")
    with pytest.raises(ExceptionGroup) as caught:
        App().build()
    assert "threads: 0 is below 1 (set by STREAMFW_THREADS)" in str(caught.value.exceptions[0])


def test_what_is_right() -> None:
    assert mistakes(blocks) == []
    assert mistakes(blocks, run_in="thread", workers=40) == []
    assert mistakes(renamed, run_in="process") == []
    assert mistakes(with_sync_publisher) == []
    assert mistakes(with_state) == []
    assert mistakes(asynchronous, workers=100) == []


def test_the_function_stays_what_it_was() -> None:
    @subscriber("orders")
    def double(number: int) -> int:
        return 2 * number

    assert double(2) == 4
    assert not inspect.iscoroutinefunction(double)


def test_where_handlers_run() -> None:
    class Callable_:
        async def __call__(self, order: Order) -> None: ...

    assert (place_of(blocks, None), place_of(blocks, "thread"), place_of(blocks, "process")) == (
        "thread",
        "thread",
        "process",
    )
    assert place_of(asynchronous, None) == "loop"
    assert is_async(Callable_())
    assert not is_async(MessageBatch)


async def test_handlers_in_the_loop_need_neither_threads_nor_processes() -> None:
    router = Router()
    router.subscriber("orders")(asynchronous)
    async with App(router).running() as app:
        assert app.build().offload.processes is None
        assert app.build().offload._threads is None
