"""What all test servers share: a home directory, used by several processes and removed by the last of them.

A module of a server derives from `Service`, and calls `register` so that `run_directory` can remove what a killed run
left of it.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from streamfw_postgres._embedded_share import Shared
from streamfw_postgres._embedded_steps import EmbeddedError, Steps, run

__all__ = ["Service", "fail", "free_port", "is_free", "register", "remembered", "run_directory", "running"]


class Service(ABC):
    """One server in `home`, started and stopped in steps; several processes may hold objects for the same `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.shared = Shared(home, mode=0o711)

    def join(self) -> Steps:
        yield from self.shared.join(self._start)

    def leave(self) -> Steps:
        yield from self.shared.leave(self._stop)

    def _stop(self) -> Steps:
        yield from self._end()
        shutil.rmtree(self.home, ignore_errors=True)

    @abstractmethod
    def _start(self) -> Steps:
        """Start the server, or find it running."""

    @abstractmethod
    def _end(self) -> Steps:
        """End all its processes, also frozen ones; the directory is removed next.

        This is also called for a home that a killed run left: an object that never started has to find the processes.
        """


AnyService = TypeVar("AnyService", bound=Service)

_leftovers: dict[str, Callable[[Path], Service]] = {}


def register(prefix: str, service: Callable[[Path], Service]) -> None:
    """Let `run_directory` remove homes whose names begin with `prefix`; `service` makes the object that ends one."""
    _leftovers[prefix] = service


def run_directory(run_id: str) -> Path:
    """Return the directory of the servers of one test run, made if it is missing, and remove what killed runs left."""
    base = Path(tempfile.gettempdir()) / f"streamfw-tests-{os.geteuid()}"
    base.mkdir(mode=0o711, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        fail(f"{base} belongs to somebody else: remove it, or set TMPDIR")
    directory = base / run_id
    directory.mkdir(mode=0o711, exist_ok=True)
    for path in (base, directory):
        path.chmod(0o711)
    for other in base.iterdir():
        if other != directory:
            for home in _homes_in(other):
                _remove_if_unused(home)
    return directory


def _homes_in(run: Path) -> list[Path]:
    try:
        return list(run.iterdir())
    except OSError:  # that run removes it just now
        return []


def _remove_if_unused(home: Path) -> None:
    """Join it as one more user and leave: whoever is the last stops and removes it."""
    make = next((make for prefix, make in _leftovers.items() if home.name.startswith(prefix)), None)
    if make is None:
        return  # of a kind that this run does not use: left to one that does
    service = make(home)
    service.shared = Shared(home, patience=0.0, mode=0o711)
    try:
        try:
            run(service.shared.join(_nothing))
        finally:
            run(service.leave())
        home.parent.rmdir()
    except (EmbeddedError, OSError):
        pass  # it starts or stops just now: it is somebody's


def _nothing() -> Steps:
    yield 0.0


@contextmanager
def running(service: AnyService) -> Iterator[AnyService]:
    """Use the server: started unless it runs, stopped and removed if nobody else uses it at the end."""
    try:
        run(service.join())
        yield service
    finally:
        run(service.leave())
        try:
            service.home.parent.rmdir()
        except OSError:
            pass  # others of this run


# ---------------------------------------------------------------------- small things


def fail(message: str) -> NoReturn:
    """Fail the test run, which lacks something that only a person can provide."""
    try:
        import pytest  # here: servers also run outside of tests, where it need not be installed
    except ImportError:
        raise SystemExit(message) from None
    pytest.fail(message, pytrace=False)


def remembered(file: Path, make: Callable[[], str]) -> str:
    """Return what the file holds; the first time what `make` returns, written with mode 0600."""
    if not file.exists():
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as stream:
            stream.write(make())
    return file.read_text()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now, and that the system does not give to clients by itself.

    While a server is down its clients try again and again; from a port of that range one of them would, now and then,
    be given the server's own port, connect to itself, and keep the server from coming back.
    """
    for _ in range(100):
        port = random.randrange(20_000, 32_000)  # Linux gives 32768 to 60999
        if is_free(port):
            return port
    fail("found no free TCP port between 20000 and 32000 on 127.0.0.1")


def is_free(port: int) -> bool:
    """Say whether nobody listens on a TCP port of 127.0.0.1, or uses it otherwise."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what just closed there is no hindrance to servers
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
