"""Handlers that the tests of processes run: at module level, where a process finds them; and little to import."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from streamfw import Attempt, Backoff, DeadLetter, Drop, Header, Message, PartialFailure, Retry, subscriber
from streamfw.runtime import blocking


class Order(msgspec.Struct):
    id: int
    folder: str = ""

    def path(self, name: str) -> Path:
        return Path(self.folder, f"{name}-{self.id}")


class Done(msgspec.Struct):
    id: int
    pid: int
    attempt: int
    tenant: str
    key: str | None
    message_id: str
    body: bytes


class Custom(Exception):
    pass


class Fussy(Exception):
    """Takes other arguments than it keeps, so it cannot be made again from its pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Strict:
    """A codec with a state of its own that travels."""

    content_type: str | None = None

    def __init__(self, most: int) -> None:
        self.most = most

    def decoder(self, annotation: Any) -> Callable[[bytes], Any]:
        decode = msgspec.json.Decoder(annotation).decode
        most = self.most

        def decode_at_most(body: bytes) -> Any:
            if len(body) > most:
                raise ValueError(f"more than {most} bytes")
            return decode(body)

        return decode_at_most

    def encode(self, value: object) -> bytes:
        return msgspec.json.encode(value)


def wait_for(path: Path, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise AssertionError(f"{path} did not come")
        time.sleep(0.005)


def note(order: Order, name: str) -> None:
    """Write this process's number where the test finds it, whole."""
    path = order.path(name)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(path)


@subscriber("all", run_in="process", workers=2, publishes="done")
def everything(
    order: Order, message: Message, attempt: Annotated[int, Attempt], *, tenant: Annotated[str, Header("tenant")] = "-"
) -> Done:
    return Done(order.id, os.getpid(), attempt, tenant, message.key, message.message_id, bytes(message.body))


@subscriber("by-keyword", run_in="process", publishes="done")
def by_keyword(attempt: Annotated[int, Attempt], *, order: Order) -> Done:
    return Done(order.id, os.getpid(), attempt, "", None, "", b"")


@subscriber("strict", run_in="process", codec=Strict(30), publishes="done")
def strictly(order: Order) -> Done:
    return Done(order.id, os.getpid(), 1, "", None, "", b"")


@subscriber("outcomes", run_in="process", attempts=2, on_error={Custom: DeadLetter})
def outcomes(order: Order, attempt: Annotated[int, Attempt]) -> object:
    if order.id == 1:
        return Drop()
    if order.id == 2:
        raise DeadLetter("for a reason")
    if order.id == 3 and attempt == 1:
        return Retry(after=0)
    if order.id == 4:
        raise Custom("mine")
    if order.id == 5:
        raise Fussy(1, 2)
    if order.id == 6:
        return open(os.devnull)
    return None


@subscriber("list", run_in="process")
def batched(orders: list[Order]) -> None:
    failed = {index: Custom(str(order.id)) for index, order in enumerate(orders) if order.id < 0}
    if failed:
        raise PartialFailure(dict(failed))


@subscriber("messages", run_in="process")
def of_messages(messages: list[Message]) -> list[object]:
    return [DeadLetter(message.message_id) for message in messages]


@subscriber("stops", run_in="process", workers=2, attempts=2)
def stops(order: Order, attempt: Annotated[int, Attempt]) -> None:
    note(order, f"runs{attempt}")
    if attempt == 1:
        wait_for(order.path("go"))
    note(order, "ended")


@subscriber("overdue", run_in="process", attempts=1)
def overdue(order: Order) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as its_own:
        order.path("grandchild").write_text(str(its_own.pid))
        note(order, "runs1")
        its_own.wait()


@subscriber("hog", run_in="process")
def hog(order: Order) -> None:
    """Holds the interpreter in C code, where no thread of Python's gets a turn."""
    import ctypes

    note(order, "runs1")
    ctypes.PyDLL(None).sleep(60)


@subscriber("signalled", run_in="process", attempts=1)
def signalled(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    note(order, "ended")


@subscriber("poison", run_in="process", attempts=2, backoff=Backoff(first=0.001))
def kills_itself(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@subscriber("forks", run_in="process", attempts=1)
def forks(order: Order) -> None:
    """Forks a process that leaves its group, as a daemon does, with all files that are open."""
    if (fork := os.fork()) == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    order.path("fork").write_text(str(fork))
    note(order, "runs1")
    time.sleep(60)


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@subscriber("variables", run_in="process", publishes="done")
def variables(order: Order) -> Done:
    return Done(order.id, VARIABLE.get(), 1, "", None, "", b"")


if blocking.IN_CHILD and os.environ.get("REFUSE_TO_BE_IMPORTED"):
    raise ImportError("not in this process")
