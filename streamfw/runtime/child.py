"""The child processes of an app: the child's end.

A child imports its handlers, says that it is ready, and then takes one job after another: (number of the target,
arguments, keyword arguments) -> (True, result) or (False, exception), pickled, with a length before each.

SIGINT and SIGTERM do nothing here: a service manager and a terminal may signal all processes of a service at once, and
the parent lets what runs finish.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing.spawn
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec

from streamfw.errors import DecodeError
from streamfw.observe.logs import configure_logging, logs_json
from streamfw.outcome import Outcome

from . import blocking
from .target import Target

__all__ = ["HEADER", "Setup", "framed", "main"]

HEADER = 8  # bytes of a length
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Setup(msgspec.Struct, kw_only=True):
    """What a child has to know first. `main_path` or `main_name`: the parent's main module, where it is needed."""

    parent: int
    argv: list[str]
    log_level: int
    log_json: bool
    targets: list[bytes]
    main_path: str | None = None
    main_name: str | None = None

    @classmethod
    def here(cls, targets: Sequence[Target]) -> Setup:
        """For the children of this process."""
        setup = cls(
            parent=os.getpid(),
            argv=list(sys.argv),
            log_level=logging.getLogger().level,
            log_json=logs_json(),
            # Each by itself: what they refer to can be imported only when the main module is there.
            targets=[pickle.dumps(target) for target in targets],
        )
        if any("__main__" in (target.module, type(target.codec).__module__) for target in targets):
            main = sys.modules["__main__"]
            setup.main_name = getattr(main.__spec__, "name", None)
            if setup.main_name is None and (path := getattr(main, "__file__", None)):
                setup.main_path = os.path.abspath(path)
        return setup


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER, "big") + data


def main(fd: int) -> None:
    """Run jobs from the socket `fd` until the parent closes it."""
    blocking.IN_CHILD = True
    os.set_inheritable(fd, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _nothing)  # not SIG_IGN, which programs that a handler starts would inherit
    connection = socket.socket(fileno=fd)
    read = connection.makefile("rb").read
    setup: Setup = pickle.loads(_frame(read))
    _die_with(setup.parent, fd)
    functions: list[Callable[..., Any]] = []
    failure = _set_up(setup, functions)
    connection.sendall(framed(pickle.dumps(failure)))
    if failure is not None:
        return
    while job := _frame(read):
        connection.sendall(framed(_done(functions, job)))
        del job


def _nothing(number: int, frame: object) -> None: ...


def _frame(read: Callable[[int], bytes]) -> bytes:
    """The next frame; empty at the end."""
    header = read(HEADER)
    return read(int.from_bytes(header, "big")) if len(header) == HEADER else b""


def _die_with(parent: int, fd: int) -> None:
    """End when the parent does, however it does."""
    threading.Thread(target=_watch, args=(fd,), name="streamfw-parent", daemon=True).start()
    if sys.platform == "linux":
        # The thread needs the interpreter, which a handler in C code may keep for as long as it likes.
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        except (OSError, AttributeError):  # a C library without it: the thread has to do
            pass
    if os.getppid() != parent:
        _end()


def _watch(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is always told; the parent's closing for writing alone is none
    poll.poll()
    _end()


def _end() -> None:
    """At once, with all that handlers have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _set_up(setup: Setup, functions: list[Callable[..., Any]]) -> tuple[str, str] | None:
    """Import everything; or the place and the text of what went wrong."""
    where = "processes"
    try:
        sys.argv[:] = setup.argv
        if setup.main_name is not None:
            multiprocessing.spawn.prepare({"init_main_from_name": setup.main_name})
        elif setup.main_path is not None:
            multiprocessing.spawn.prepare({"init_main_from_path": setup.main_path})
        for pickled in setup.targets:
            target: Target = pickle.loads(pickled)
            where = target.where
            functions.append(_function(target))
    except BaseException as error:  # SystemExit as well: a main module that runs its app when it is imported
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return where, f"a process that runs it cannot be set up (its error output says where): {text}"
    configure_logging(setup.log_json, setup.log_level, process=True)
    return None


def _function(target: Target) -> Callable[..., Any]:
    function: Any = import_module(target.module)
    for part in target.name.split("."):
        function = getattr(function, part)
    body, position, codec = target.body, target.position, target.codec
    if body is None or codec is None:
        return typing.cast(Callable[..., Any], function)
    hint = typing.get_type_hints(function, include_extras=True)[body]
    decode = codec.decoder(hint)

    def decode_and_call(*args: Any, **kwargs: Any) -> Any:
        try:
            if position is None:
                kwargs[body] = decode(kwargs[body])
            else:
                args = (*args[:position], decode(args[position]), *args[position + 1 :])
        except Exception as error:
            raise DecodeError(f"the body cannot be decoded: {error}"[:1024]) from None
        return function(*args, **kwargs)

    return decode_and_call


def _done(functions: list[Callable[..., Any]], job: bytes) -> bytes:
    """Do one job; its result or its error, pickled."""
    try:
        call: tuple[int, tuple[Any, ...], dict[str, Any]] = pickle.loads(job)
        number, args, kwargs = call
        result: object = functions[number](*args, **kwargs)
    except BaseException as error:  # SystemExit, too: the parent raises it, as it does for any other handler
        return _pickled_error(error)
    try:
        return pickle.dumps((True, result), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever pickling somebody's object raises
        return _pickled_error(TypeError(f"the result, a {type(result).__name__}, cannot be pickled: {error}"))


def _pickled_error(error: BaseException) -> bytes:
    """`error`, with its traceback as a note; in words where it cannot be pickled and made again."""
    if not isinstance(error, Outcome):
        error.add_note("in its process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickled = pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
        pickle.loads(pickled)  # many exceptions take other arguments than they keep
    except Exception:
        stand_in = RuntimeError(f"{type(error).__qualname__}: {error} (it cannot be pickled, so this stands for it)")
        for note in getattr(error, "__notes__", ()):
            stand_in.add_note(note)
        return pickle.dumps((False, stand_in), pickle.HIGHEST_PROTOCOL)
    return pickled
