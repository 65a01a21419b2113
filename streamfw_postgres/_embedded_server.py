"""One private Postgres server: made, started and stopped. The one way in which this project starts a Postgres.

Theory of operation. ``home`` holds the data directory (``data``), the log (``server.log``) and ``server.lock``. The
server inherits an exclusive flock on ``server.lock`` and so do all its processes: the lock is held exactly as long as
one of them lives, whatever became of who started it, and whatever stands in a stale ``postmaster.pid``. That file
then says which pid to signal and, in its eighth line, how far the server is (Postgres: ``pidfile.h``).

``pg_ctl`` detaches the server: it is nobody's child, so whoever stops it need not be who started it.

A server whose plain account cannot traverse the way to ``home`` (root's ``/root/app/db``) is started *in* the data
directory and told its name as ``/proc/self/cwd``: no mode has to be changed. Without a ``/proc`` that is an error.
"""

from __future__ import annotations

import enum
import fcntl
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path

from ._embedded_binaries import Account, can_enter
from ._embedded_data import ensure_data
from ._embedded_process import WORKING_DIRECTORY, Programs, lives, works_in
from ._embedded_steps import POLL, EmbeddedError, Steps, lock_file, run, try_lock

__all__ = ["PostgresServer", "State"]

_SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes of a Unix socket's path (``sun_path`` without its NUL)."""

_STATES = {"ready": "ready", "standby": "ready", "stopping": "stopping"}


class State(enum.Enum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class PostgresServer:
    """A server in `home`, run from the programs in `binaries`.

    `account` is whom it runs as (the owner of its data directory), `password` that of its superuser `user`, set when
    the data directory is made. It listens on a Unix socket in `socket_directory()`, and on TCP only where `listen`
    names addresses. `settings` are given on its command line at each start. `sync=False` makes the data directory
    without waiting for the disk, for tests. Times are in seconds.

    What waits comes in two forms: `starting`, `stopping`, `crashing` are steps (see `_embedded_steps`), `start`,
    `stop`, `restart`, `crash` do the same in this thread. All raise `EmbeddedError`. None of them may run twice at once
    for one `home`: `Shared` sees to that where several processes meet.
    """

    def __init__(
        self,
        binaries: Path,
        home: Path,
        *,
        account: Account,
        password: str,
        user: str = "postgres",
        port: int = 5432,
        listen: str = "",
        settings: Mapping[str, str] | None = None,
        sync: bool = True,
        start_timeout: float = 120.0,
        stop_timeout: float = 30.0,
    ) -> None:
        self.home = home
        self.data = home / "data"
        self.account = account
        self.user = user
        self.port = port
        self.listen = listen
        self.settings = dict(settings or {})
        self._programs = Programs(binaries, account, home / "server.log")
        self._password = password
        self._sync = sync
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout

    def __repr__(self) -> str:
        return f"<PostgresServer {self.home} {self.state().value}>"

    # ------------------------------------------------------------------ what it is

    def state(self) -> State:
        """Say how far the server is; asks the kernel and the server's pid file, never the server itself."""
        if not self._lock_is_held():
            return State.STOPPED
        pid, status = self._pid_file()
        if pid is not None and not lives(pid):
            return State.STOPPING  # killed: its other processes are about to notice
        return State(_STATES.get(status, "starting"))

    def pid(self) -> int | None:
        """Return the pid of the running server's main process."""
        pid, _ = self._pid_file()
        return pid if pid is not None and self._lock_is_held() and lives(pid) else None

    def socket_directory(self) -> Path:
        """Return the directory of the server's socket: ``home/socket``, or what the last start had to use instead."""
        try:
            return Path((self.home / "socket.path").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self.home / "socket"

    def log_says(self) -> str:
        """Return the last lines of the server's log."""
        return self._programs.log_says()

    # ------------------------------------------------------------------ in this thread

    def start(self) -> None:
        run(self.starting())

    def stop(self) -> None:
        run(self.stopping())

    def restart(self) -> None:
        run(self.stopping())
        run(self.starting())

    def crash(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it without a shutdown checkpoint: by SIGKILL, or with `SIGQUIT` by an immediate shutdown."""
        run(self.crashing(how))

    # ------------------------------------------------------------------ in steps

    def starting(self) -> Steps:
        """Return when the server takes connections: it did already, or it is started, its data directory made first."""
        end = time.monotonic() + self._start_timeout
        while (state := self.state()) is not State.STOPPED:
            if state is State.READY:
                return
            if time.monotonic() > end:
                raise self._too_slow(state)
            yield POLL
        lock = yield from self._take_lock(end)
        try:
            yield from self._launch(lock)
        finally:
            os.close(lock)  # no unlock: the server holds it now
        while (state := self.state()) is not State.READY:
            if state is State.STOPPED:
                raise EmbeddedError(f"the Postgres server in {self.home} did not start; {self.log_says()}")
            if time.monotonic() > end:
                raise self._too_slow(state)
            yield POLL

    def stopping(self) -> Steps:
        """Stop it: fast (transactions are rolled back, all is checkpointed), and harder after each `stop_timeout`."""
        for how in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if (yield from self._end(how, self._stop_timeout)):
                self._remove_socket_directory()
                return
            if self.pid() is None:
                break  # nobody whom a harder signal could reach
        raise EmbeddedError(f"the Postgres server in {self.home} does not end ({self._who()}); {self.log_says()}")

    def crashing(self, how: signal.Signals = signal.SIGKILL) -> Steps:
        if not (yield from self._end(how, self._stop_timeout)):
            raise EmbeddedError(f"processes of the server in {self.home} outlived its {how.name}; {self.log_says()}")

    def _end(self, how: signal.Signals, patience: float) -> Generator[float, None, bool]:
        end = time.monotonic() + patience
        signalled = None
        while self.state() is not State.STOPPED:
            pid = self.pid()
            if pid is not None and pid != signalled:
                with suppress(ProcessLookupError):
                    os.kill(pid, how)
                signalled = pid
            if time.monotonic() > end:
                return False
            yield POLL
        return True

    def _launch(self, lock: int) -> Steps:
        self._programs.rotate_log()
        yield from ensure_data(
            self._programs, self.data, user=self.user, password=self._password, sync=self._sync, lock=lock
        )
        self._remove_stale_pid_file()
        settings = {
            "listen_addresses": self.listen,
            "port": str(self.port),
            "unix_socket_directories": str(self._make_socket_directory()),
            "unix_socket_permissions": "0700",
            **self.settings,
        }
        options = shlex.join(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))
        yield from self._programs.execute("pg_ctl", ["start", "-W", "-s", "-o", options], self.data, lock=lock)

    # ------------------------------------------------------------------ the lock and the pid file

    def _lock_is_held(self) -> bool:
        try:
            fd = lock_file(self.home / "server.lock")
        except FileNotFoundError:
            return False  # no home: no server
        try:
            return not try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _take_lock(self, end: float) -> Generator[float, None, int]:
        fd = lock_file(self.home / "server.lock")
        try:
            while not try_lock(fd, fcntl.LOCK_EX):  # a look at the state holds it shared for a moment
                if time.monotonic() > end:
                    raise self._too_slow(State.STOPPING)
                yield POLL
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _pid_file(self) -> tuple[int | None, str]:
        """Return the pid and the status of ``postmaster.pid``, as far as they are written."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        pid = int(lines[0]) if lines and lines[0].strip().isdecimal() else None
        return pid, lines[7].strip() if len(lines) > 7 else ""

    def _remove_stale_pid_file(self) -> None:
        """Remove what a killed server left: its pid may be another process by now, and Postgres would not start.

        Called with the lock, so no server of ours runs. One that somebody started by hand does not hold the lock;
        its working directory tells.
        """
        pid, _ = self._pid_file()
        if pid is not None and lives(pid):
            if not WORKING_DIRECTORY.exists():
                return  # no way to tell whose pid this is: Postgres decides
            if works_in(pid, self.data):
                raise EmbeddedError(
                    f"{self.data} is in use by a server that was started by hand (pid {pid}): stop that one first"
                )
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    # ------------------------------------------------------------------ the socket

    def _make_socket_directory(self) -> Path:
        """Make a directory of mode 0700 for the socket: below `home`, or a temporary one that `home` remembers."""
        self._remove_socket_directory()
        directory = self.home / "socket"
        name = f"{directory}/.s.PGSQL.{self.port}"
        if len(os.fsencode(name)) <= _SOCKET_PATH_LIMIT and can_enter(self.account, self.home):
            directory.mkdir(mode=0o700)
        else:
            directory = self._temporary_directory()
            (self.home / "socket.path").write_text(str(directory), encoding="utf-8")
        if not self.account.is_us:
            os.chown(directory, self.account.uid, self.account.gid)
        return directory

    def _temporary_directory(self) -> Path:
        base = Path(tempfile.gettempdir())
        if not can_enter(self.account, base):
            raise EmbeddedError(
                f"the account {self.account.name!r} cannot enter {base}, and {self.home} (too long, or closed to that "
                "account) cannot hold the server's socket: set TMPDIR to a directory that it can enter"
            )
        return Path(tempfile.mkdtemp(prefix="streamfw-", dir=base))

    def _remove_socket_directory(self) -> None:
        directory = self.socket_directory()
        with suppress(FileNotFoundError):
            # A temporary directory may be gone and its name taken by somebody else: only what is ours is removed.
            if directory.lstat().st_uid in (self.account.uid, os.geteuid()) and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)
        (self.home / "socket.path").unlink(missing_ok=True)

    def _too_slow(self, state: State) -> EmbeddedError:
        return EmbeddedError(
            f"the Postgres server in {self.home} is still {state.value} after {self._start_timeout:g} s "
            f"({self._who()}); {self.log_says()}"
        )

    def _who(self) -> str:
        pid = self.pid()
        return f"pid {pid}" if pid else "no pid to be seen: does it run in another container?"
