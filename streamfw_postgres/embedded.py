"""A Postgres server of your own in a directory: what ``postgres+embedded://PATH`` stands on.

    async with embedded(Path("var/db")) as server:
        connection = await asyncpg.connect(**server.connect_arguments())

The first user of a directory makes its database cluster and starts the server, later ones (of other processes, too)
join, the last one stops it, also when the others were killed. When all were killed the server goes on; the next user
adopts it.

In PATH, which is made with mode 0700 (0711 for root, whose server runs as a plain account):

    data/              the data directory, of the account that the server runs as
    password           the superuser's random password, mode 0600; every connection needs it (scram-sha-256)
    socket/            the Unix socket, mode 0700; no TCP. If PATH is too long for a socket, or the plain account cannot
    socket.path        reach it, the socket is in a private temporary directory that this file names
    server.log         what the server says
    *.lock, users/     who uses it (see `_embedded_share`, `_embedded_server`)

The server is durable: fsync stays on. Root runs it as the owner of `data`, or for a new one as `user`, else
``postgres``, else ``nobody``; PATH may lie where that account cannot go (see `_embedded_server`). Modes of directories
that were there before are never changed. POSIX systems only, and a local file system.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote, urlencode

from anyio import CancelScope

from ._embedded_binaries import Account, plain_account, wheel_binaries
from ._embedded_server import PostgresServer, State
from ._embedded_share import Shared
from ._embedded_steps import EmbeddedError, Steps, run_async

__all__ = ["ConnectArguments", "EmbeddedError", "EmbeddedServer", "embedded"]

_USER = "postgres"
_PORT = 5432  # without TCP only a part of the socket's name

_SETTINGS = {
    "max_connections": "100",
    "cluster_name": "streamfw",  # tells it apart in a list of processes
    "jit": "off",  # short statements: compiling them costs more than it saves
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

_OURS = {"port", "unix_socket_directories", "unix_socket_permissions", "data_directory", "config_file", "hba_file"}


class ConnectArguments(TypedDict):
    """Arguments of `asyncpg.connect` and `asyncpg.create_pool`."""

    host: str
    port: int
    user: str
    password: str
    database: str


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """How to reach a running embedded server. `host` is the directory of its Unix socket."""

    path: Path
    host: str
    port: int
    user: str
    database: str
    password: str = field(repr=False)

    @property
    def dsn(self) -> str:
        """The URL for Postgres clients. It holds the password: never show it."""
        where = urlencode({"host": self.host, "port": self.port})
        return f"postgresql://{quote(self.user)}:{quote(self.password)}@/{quote(self.database)}?{where}"

    def connect_arguments(self) -> ConnectArguments:
        """The same as arguments of `asyncpg.connect`."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "database": self.database,
        }

    def describe(self) -> str:
        """Say which server this is, without its password."""
        return f"embedded Postgres in {self.path} (socket {self.host}, user {self.user}, database {self.database})"


@asynccontextmanager
async def embedded(
    path: Path | str,
    *,
    user: str | None = None,
    settings: Mapping[str, str] | None = None,
    start_timeout: float = 120.0,
    stop_timeout: float = 30.0,
) -> AsyncGenerator[EmbeddedServer, None]:
    """Use the server in `path`, starting it if it does not run; the last user stops it at the end.

    `user` is the account that root starts a new server as. `settings` go over the default ones; they, like
    `start_timeout` and `stop_timeout` (seconds; then the stop becomes an immediate one), are those of whoever starts or
    stops it. A server that is shutting down is waited for and started again.

    Raises `EmbeddedError`, with the last lines of the server's log where they say why.
    """
    if wrong := sorted(_OURS.intersection(settings or ())):
        raise EmbeddedError(
            f"these settings of the embedded server in {path} are not free to choose: {', '.join(wrong)}"
        )
    home = _resolved(path)
    use = _Use(home, user, {**_SETTINGS, **(settings or {})}, start_timeout, stop_timeout)
    try:
        await _drive(use.join(), home)
    except BaseException as error:
        try:
            await _leave(use, home)  # it may have been started, half or whole
        except EmbeddedError as another:
            error.add_note(str(another))
        raise
    try:
        yield use.facts()
    finally:
        await _leave(use, home)


async def _leave(use: _Use, home: Path) -> None:
    with CancelScope(shield=True):  # bounded by the timeouts of the stop
        await _drive(use.leave(), home)


async def _drive(steps: Steps, home: Path) -> None:
    try:
        await run_async(steps)
    except OSError as error:
        raise EmbeddedError(f"the embedded server in {home} cannot be used: {error}") from error


def _resolved(path: Path | str) -> Path:
    return Path(path).expanduser().resolve()


class _Use:
    """One user of the server in `home`, in steps."""

    def __init__(
        self, home: Path, account: str | None, settings: Mapping[str, str], start_timeout: float, stop_timeout: float
    ) -> None:
        self._home = home
        self._account_name = account
        self._settings = settings
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._shared = Shared(home, patience=2 * start_timeout)
        self._server: PostgresServer | None = None
        self._password = ""

    def join(self) -> Steps:
        _open_home(self._home)
        yield from self._shared.join(self._start)

    def leave(self) -> Steps:
        yield from self._shared.leave(self._stop)

    def facts(self) -> EmbeddedServer:
        assert self._server is not None
        return EmbeddedServer(
            path=self._home,
            host=str(self._server.socket_directory()),
            port=_PORT,
            user=_USER,
            database="postgres",
            password=self._password,
        )

    def _start(self) -> Steps:
        account = _account(self._home, self._account_name)
        self._password = _password(self._home)
        self._server = PostgresServer(
            wheel_binaries(account),
            self._home,
            account=account,
            user=_USER,
            password=self._password,
            port=_PORT,
            settings=self._settings,
            start_timeout=self._start_timeout,
            stop_timeout=self._stop_timeout,
        )
        yield from self._server.starting()

    def _stop(self) -> Steps:
        if self._server is not None and self._server.state() is not State.STOPPED:
            yield from self._server.stopping()


def _open_home(home: Path) -> None:
    """Make the directory, or see that the one that is there is ours and safe."""
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        home.mkdir(mode=0o700)
    except FileExistsError:
        if not home.is_dir():
            raise EmbeddedError(f"{home} is a file: an embedded server needs a directory of its own") from None
        info = home.stat()
        if info.st_uid != os.geteuid():
            raise EmbeddedError(
                f"{home} belongs to the account {Account.of(info.st_uid).name!r}: use the server as that account, "
                "or another directory"
            ) from None
        if info.st_mode & 0o002:
            raise EmbeddedError(
                f"everybody may write into {home}: take that away (chmod o-w), or use another"
            ) from None
        if not (home / "start.lock").exists() and any(home.iterdir()):
            # Checked again, because another first user may be between making the lock and us.
            if (home / "start.lock").exists():
                return
            raise EmbeddedError(
                f"{home} holds other files: an embedded server needs a directory of its own (a new or an empty one)"
            ) from None
    else:
        if os.geteuid() == 0:
            home.chmod(0o711)  # the plain account passes through to its data directory


def _account(home: Path, name: str | None) -> Account:
    """The owner of the data directory; where there is none yet, the account for a new one."""
    try:
        owner = Account.of((home / "data").stat().st_uid)
    except FileNotFoundError:
        return plain_account(name)
    if name is not None and owner.name != name:
        raise EmbeddedError(f"{home}/data belongs to the account {owner.name!r}: the server cannot run as {name!r}")
    if os.geteuid() != 0 or owner.uid == 0:
        return plain_account()
    return owner


def _password(home: Path) -> str:
    """Read the superuser's password, or make one, durable before any data directory that knows it."""
    file = home / "password"
    try:
        info = file.stat()
    except FileNotFoundError:
        if (home / "data").exists():
            raise EmbeddedError(f"{file} is missing, and {home}/data knows its password: bring the file back") from None
        return _new_password(file)
    if info.st_mode & 0o077:
        raise EmbeddedError(f"{file} can be read by others (mode {info.st_mode & 0o777:04o}): chmod 600 it")
    password = file.read_text(encoding="ascii", errors="replace").strip()
    if not password:
        raise EmbeddedError(f"{file} is empty: bring the file back, or remove it and {home}/data")
    return password


def _new_password(file: Path) -> str:
    password = secrets.token_urlsafe(32)
    unfinished = file.with_name(f"password.new.{secrets.token_hex(4)}")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as stream:
        stream.write(password + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)
    return password
