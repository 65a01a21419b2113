"""One private Postgres server: made, started and stopped. The one way in which this project starts a Postgres.

Theory of operation. ``home`` holds the data directory (``data``), the log (``server.log``) and ``server.lock``. The
server inherits an exclusive flock on ``server.lock`` and so do all its processes: the lock is held exactly as long as
one of them lives, whatever became of who started it, and whatever stands in a stale ``postmaster.pid``. That file
then says which pid to signal and, in its eighth line, how far the server is (Postgres: ``pidfile.h``).

`initdb` works in ``data.new.*`` and is renamed when it is complete, holding the same lock: a half-finished one is
thrown away by the next start. ``pg_ctl`` detaches the server, so that it is nobody's child and leaves no zombie.

A server whose plain account cannot traverse the way to ``home`` (root's ``/root/app/db``) is started *in* the data
directory and told its name as ``/proc/self/cwd``: no mode has to be changed. Without a ``/proc`` that is an error.
"""

from __future__ import annotations

import enum
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ._embedded_binaries import Account, can_enter
from ._embedded_steps import POLL, EmbeddedError, Steps, lock_file, run, try_lock

__all__ = ["PostgresServer", "State"]

_SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes of a Unix socket's path (``sun_path`` without its NUL)."""

_LOG_LIMIT = 16 << 20
"""Bytes after which a start moves the log to ``server.log.1``."""

_THE_WORKING_DIRECTORY = Path("/proc/self/cwd")


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
        self.binaries = binaries
        self.home = home
        self.data = home / "data"
        self.log = home / "server.log"
        self.account = account
        self.user = user
        self.port = port
        self.listen = listen
        self.settings = dict(settings or {})
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
        lines = self._pid_file()
        if lines and not _lives(lines[0]):
            return State.STOPPING  # killed: its other processes are about to notice
        status = lines[7].strip() if len(lines) > 7 else "starting"
        return {"ready": State.READY, "standby": State.READY, "stopping": State.STOPPING}.get(status, State.STARTING)

    def pid(self) -> int | None:
        """Return the pid of the running server's main process."""
        lines = self._pid_file() if self._lock_is_held() else []
        return int(lines[0]) if lines and _lives(lines[0]) else None

    def major_version(self) -> int:
        """Return the major version of the programs (18, say)."""
        text = subprocess.run(
            [self.binaries / "postgres", "--version"],
            capture_output=True,
            text=True,
            cwd="/",
            env=_environment(),
            check=False,
            **self.account.run_as(),
        ).stdout
        number = text.partition("PostgreSQL) ")[2].partition(".")[0]
        if not number.isdecimal():
            raise EmbeddedError(f"{self.binaries}/postgres does not run: it told no version ({text.strip()!r})")
        return int(number)

    def socket_directory(self) -> Path:
        """Return the directory of the server's socket: ``home/socket``, or what the last start had to use instead."""
        try:
            return Path((self.home / "socket.path").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self.home / "socket"

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

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
            self._rotate_log()
            yield from self._ensure_data(lock)
            self._remove_stale_pid_file()
            yield from self._launch(lock, self._make_socket_directory())
        finally:
            os.close(lock)  # no unlock: the server holds it now
        while (state := self.state()) is not State.READY:
            if state is State.STOPPED:
                raise EmbeddedError(f"the Postgres server in {self.home} did not start; {self._log_says()}")
            if time.monotonic() > end:
                raise self._too_slow(state)
            yield POLL

    def stopping(self) -> Steps:
        """Stop it: fast (transactions are rolled back, all is checkpointed), and harder when that takes too long."""
        ways = ((signal.SIGINT, self._stop_timeout), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))
        for how, patience in ways:
            if (yield from self._end(how, patience)):
                self._remove_socket_directory()
                return
        raise EmbeddedError(f"the Postgres server in {self.home} does not end (pid {self.pid()}); {self._log_says()}")

    def crashing(self, how: signal.Signals = signal.SIGKILL) -> Steps:
        if not (yield from self._end(how, self._stop_timeout)):
            raise EmbeddedError(f"processes of the server in {self.home} outlived its {how.name}; {self._log_says()}")

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

    def _pid_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove_stale_pid_file(self) -> None:
        """Remove what a killed server left: its pid may be another process by now, and Postgres would not start.

        Called with the lock, so no server of ours runs. One that somebody started by hand does not hold the lock;
        its working directory tells.
        """
        lines = self._pid_file()
        if not lines:
            return
        if _lives(lines[0]):
            if not _THE_WORKING_DIRECTORY.exists():
                return  # no way to tell whose pid this is: Postgres decides
            if _works_in(lines[0], self.data):
                raise EmbeddedError(
                    f"{self.data} is in use by a server that was started by hand (pid {lines[0]}): stop that one first"
                )
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    # ------------------------------------------------------------------ the data directory

    def _ensure_data(self, lock: int) -> Steps:
        for unfinished in self.home.glob("data.new.*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if self.data.exists():
            self._check_data()
            return
        target = self.home / f"data.new.{secrets.token_hex(4)}"
        target.mkdir(mode=0o700)
        try:
            if not self.account.is_us:
                os.chown(target, self.account.uid, self.account.gid)
            yield from self._initdb(target, lock)
            target.rename(self.data)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        if self._sync:
            _sync_directory(self.home)

    def _check_data(self) -> None:
        owner = self.data.stat().st_uid
        if owner != self.account.uid:
            raise EmbeddedError(
                f"{self.data} belongs to the account {Account.of(owner).name!r}, the server would run as "
                f"{self.account.name!r}: run as that account, or use another directory"
            )
        try:
            version = (self.data / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            raise EmbeddedError(
                f"{self.data} is not a Postgres data directory (no PG_VERSION): move it away, or use another directory"
            ) from None
        if version != str(self.major_version()):
            raise EmbeddedError(
                f"{self.data} was made by Postgres {version}, the installed server is {self.major_version()}: "
                f"use a server of version {version} (dump with it, then restore), or use another directory"
            )

    def _initdb(self, target: Path, lock: int) -> Steps:
        locale = ["--locale=C"]
        if self.major_version() >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        command = ["-U", self.user, "-A", "scram-sha-256", "--pwfile=/dev/stdin", "-E", "UTF8", *locale]
        if not self._sync:
            command.append("--no-sync")
        reader, writer = os.pipe()  # the password goes through a pipe, never through a file or an argument
        try:
            if not self.account.is_us:
                os.fchown(reader, self.account.uid, self.account.gid)  # /dev/stdin is opened anew, by its owner
            os.write(writer, self._password.encode() + b"\n")
            os.close(writer)
            yield from self._execute("initdb", command, target, stdin=reader, lock=lock)
        finally:
            os.close(reader)

    # ------------------------------------------------------------------ sockets and processes

    def _make_socket_directory(self) -> Path:
        """Make a directory of mode 0700 for the socket: below `home`, or a temporary one that `home` remembers."""
        remembered = self.home / "socket.path"
        self._remove_socket_directory()
        directory = self.home / "socket"
        name = f"{directory}/.s.PGSQL.{self.port}"
        if len(os.fsencode(name)) <= _SOCKET_PATH_LIMIT and can_enter(self.account, self.home):
            directory.mkdir(mode=0o700)
        else:
            directory = Path(tempfile.mkdtemp(prefix="streamfw-"))
            if not can_enter(self.account, directory.parent):
                directory.rmdir()
                raise EmbeddedError(
                    f"the account {self.account.name!r} can enter neither {self.home} nor {directory.parent} to make "
                    "the server's socket: set TMPDIR to a directory that it can enter"
                )
            remembered.write_text(str(directory), encoding="utf-8")
        if not self.account.is_us:
            os.chown(directory, self.account.uid, self.account.gid)
        return directory

    def _remove_socket_directory(self) -> None:
        directory = self.socket_directory()
        try:
            info = directory.lstat()
        except FileNotFoundError:
            pass
        else:
            # A temporary directory may be gone and its name taken by somebody else: only what is ours is removed.
            if directory.is_dir() and not directory.is_symlink() and info.st_uid in (self.account.uid, os.geteuid()):
                shutil.rmtree(directory, ignore_errors=True)
        (self.home / "socket.path").unlink(missing_ok=True)

    def _launch(self, lock: int, sockets: Path) -> Steps:
        settings = {
            "listen_addresses": self.listen,
            "port": str(self.port),
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            **self.settings,
        }
        options = shlex.join(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))
        yield from self._execute("pg_ctl", ["start", "-W", "-s", "-o", options], self.data, lock=lock)

    def _execute(
        self, program: str, arguments: Sequence[str], data: Path, *, lock: int, stdin: int = subprocess.DEVNULL
    ) -> Steps:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                [self.binaries / program, "-D", str(self._name_of(data)), *arguments],
                cwd=data,
                stdin=stdin,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C in our terminal is not for the server
                umask=0o077,
                env=_environment(),
                **self.account.run_as(),
            )
        except OSError as error:
            raise EmbeddedError(f"cannot run {self.binaries}/{program} as {self.account.name!r}: {error}") from error
        finally:
            os.close(log)
        try:
            while process.poll() is None:
                yield POLL
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode != 0:
            raise EmbeddedError(f"{program} failed in {self.home} (exit {process.returncode}); {self._log_says()}")

    def _name_of(self, data: Path) -> Path:
        if can_enter(self.account, data):
            return data
        if _THE_WORKING_DIRECTORY.exists():
            return _THE_WORKING_DIRECTORY
        raise EmbeddedError(
            f"the account {self.account.name!r}, which root runs the server as, cannot enter {data.parent}: "
            "use a directory that it can enter"
        )

    def _rotate_log(self) -> None:
        with suppress(FileNotFoundError):
            if self.log.stat().st_size > _LOG_LIMIT:
                self.log.replace(self.log.with_name("server.log.1"))

    # ------------------------------------------------------------------ errors

    def _log_says(self) -> str:
        return f"{self.log} ends with:\n{self.log_tail()}"

    def _too_slow(self, state: State) -> EmbeddedError:
        pid = f"pid {self.pid()}" if self.pid() else "no pid to be seen: a server in another container?"
        return EmbeddedError(
            f"the Postgres server in {self.home} is still {state.value} after {self._start_timeout:g} s ({pid}); "
            + self._log_says()
        )


def _environment() -> dict[str, str]:
    """What a server needs of our environment; PGDATA, PGPORT and their kind would change what it does."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ", "TMPDIR") if name in os.environ}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", **kept}


def _lives(pid: str) -> bool:
    """Say whether the process exists and is no zombie (in a container nobody may wait for those)."""
    if not pid.strip().isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, IndexError, ProcessLookupError):
        return not _THE_WORKING_DIRECTORY.exists()


def _works_in(pid: str, directory: Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{int(pid)}/cwd", directory)
    except OSError:
        return False  # gone, or of another account: not a server of this directory


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
