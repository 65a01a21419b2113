"""The service of a RabbitMQ node, and how to reach it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

from streamfw_postgres._embedded_steps import Steps

from ._homes import Service, fail, register
from ._rabbit_control import RabbitServerError, evaluate, term
from ._rabbit_node import USER, Node
from ._rabbit_vhosts import permissions

__all__ = ["URL", "Rabbit", "RabbitService", "closing", "external"]

T = TypeVar("T")

URL = "TEST_RABBITMQ_URL"
"""The environment variable; one that begins with STREAMFW_ would be a setting of the app that a test runs."""


# ---------------------------------------------------------------------- how to reach one


@dataclass(frozen=True, slots=True, kw_only=True)
class Rabbit:
    """How to reach a vhost of a test server.

    The certificate is for 127.0.0.1 and localhost, by the CA in `ca`. Of a server that the environment names only `url`
    is known: the other URLs, and what asks the server itself by way of its `home`, raise `RabbitServerError`.
    """

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    tls_port: int = 0
    stream_port: int = 0
    ca: Path | None = None
    home: Path | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"amqp://{self._login}@{self.host}:{self.port}/{quote(self.vhost, '')}"

    @property
    def tls_url(self) -> str:
        """The URL with TLS, for who trusts `ca`."""
        return f"amqps://{self._login}@{self.host}:{self._known(self.tls_port)}/{quote(self.vhost, '')}"

    @property
    def stream_url(self) -> str:
        """The URL for clients of the stream protocol."""
        port = self._known(self.stream_port)
        return f"rabbitmq-stream://{self._login}@{self.host}:{port}/{quote(self.vhost, '')}"

    @property
    def _login(self) -> str:
        return f"{quote(self.user, '')}:{quote(self.password, '')}"

    def at(self, host: str, port: int) -> Rabbit:
        """The same by way of a proxy."""
        return replace(self, host=host, port=port)

    def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl` (0.4 to 2 s) for the node and return what it printed; see also `evaluate`."""
        return self._node().ctl(*arguments)

    def evaluate(self, expressions: str) -> str:
        """Evaluate Erlang in the node (0.1 ms) and return the value as Erlang writes it."""
        return evaluate(self._node().home, expressions)

    def permit(self, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        """Set what the user may do in the vhost: patterns of names, "" for none."""
        self.evaluate(permissions(self.vhost, self.user, configure, write, read))

    def close_connections(self) -> int:
        """Let the server close all connections to the vhost (320), and return how many there were."""
        tracked = f"rabbit_connection_tracking:list({term(self.vhost)})"
        pids = f"[Pid || Each <- {tracked}, Pid <- tuple_to_list(Each), is_pid(Pid)]"
        return int(self.evaluate(closing(pids)))

    def _node(self) -> Node:
        return Node(self._known(self.home))

    def _known(self, value: T | None) -> T:
        if not value:
            raise RabbitServerError(f"{self.host}:{self.port} was not started here: unset {URL} for this test")
        return value


def closing(pids: str) -> str:
    """The expression that closes connections and gives their number."""
    return f'Found = {pids}, rabbit_networking:close_connections(Found, "closed by a test"), length(Found)'


def external() -> Rabbit | None:
    """The server that the environment names."""
    url = os.environ.get(URL)
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme != "amqp" or not parts.hostname:
        fail(f"{URL} must be amqp://user:password@host:port/vhost")
    return Rabbit(
        host=parts.hostname,
        port=parts.port or 5672,
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        vhost=unquote(parts.path[1:]) or "/",
    )


# ---------------------------------------------------------------------- one server


class RabbitService(Service):
    """The node in `home`; several processes may hold objects for the same `home`."""

    def __init__(self, home: Path, *, settings: Mapping[str, str] | None = None, plugins: Sequence[str] = ()) -> None:
        super().__init__(home)
        self.node = Node(home / "node")
        self._settings = settings or {}
        self._plugins = plugins

    def _start(self) -> Steps:
        if (self.home / "ready").exists():
            yield from self.node.starting()
            return
        for last in (False, False, True):
            yield from self._end()  # what a user left that was killed here, or the last attempt
            self.node.make(self._settings, self._plugins)
            try:
                yield from self.node.starting()
                break
            except RabbitServerError:
                # Between our look for a free port and the server's use of it somebody else may take it.
                yield from self._end()
                if last or not self.node.lost_a_port():
                    raise
        (self.home / "ready").touch()

    def _end(self) -> Steps:
        yield from self.node.ending()  # nothing of it is kept

    def facts(self) -> Rabbit:
        ports = self.node.ports
        return Rabbit(
            host="127.0.0.1",
            port=ports.amqp,
            user=USER,
            password=self.node.password,
            tls_port=ports.tls,
            stream_port=ports.stream,
            ca=self.node.ca,
            home=self.node.home,
        )


register("rabbit", RabbitService)
