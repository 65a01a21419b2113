"""One RabbitMQ node in a directory of its own, on 127.0.0.1, with an epmd of its own.

What a node is and does is in its directory, so that any process can find, signal and stop it: ``ports``, ``password``,
``rabbitmq.conf``, ``pid``, ``server.log``, ``data``. The directory is also the node's ``HOME``: there Erlang puts its
cookie, and by it all of the node's processes are known: the server's and those it starts (erl_child_setup,
inet_gethost, and epmd, which goes on when the node ends).

The variables are those of https://www.rabbitmq.com/docs/configure. Debian's programs in ``/usr/sbin`` change to the
package's account and read ``/etc/rabbitmq``; those in ``/usr/lib/rabbitmq/bin`` do neither.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped, unused-ignore]

from streamfw_postgres._embedded_steps import Steps

from ._certificates import make_certificates
from ._homes import free_port, is_free, remembered
from ._rabbit_control import SCRIPT, SOCKET, RabbitServerError, evaluate
from ._rabbit_root import command, programs

__all__ = ["USER", "Node", "Ports"]

USER = "streamfw"
"""The node's administrator."""

_HOST = "localhost"
_STREAMS = "rabbitmq_stream"
_MARK = "=== start\n"
_START = 60.0
_STOP = 20.0

_children: dict[int, subprocess.Popen[bytes]] = {}
"""The nodes this process started: it has to collect what they leave, whoever stops them."""


class Ports(msgspec.Struct, frozen=True):
    """The ports of a node. `tools` is the first of ten that the command line tools listen on while they run."""

    amqp: int
    tls: int
    stream: int
    distribution: int
    epmd: int
    tools: int


def _choose_ports() -> Ports:
    found: dict[int, None] = {}
    while len(found) < len(Ports.__struct_fields__):
        found[free_port()] = None
    return Ports(*found)


def _is_stopped(pid: int) -> bool:
    """Whether none of its threads runs (proc(5): the state is behind the name in parentheses)."""
    try:
        told = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # one has just ended
    return {text.rpartition(")")[2].split()[0] for text in told} <= {"T"}


class Node:
    """The node in `home`, which may run or not."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def ports(self) -> Ports:
        """Its ports, the same for as long as the directory exists."""
        text = remembered(self.home / "ports", lambda: msgspec.json.encode(_choose_ports()).decode())
        return msgspec.json.decode(text, type=Ports)

    @property
    def name(self) -> str:
        """Its name among the nodes of a cluster."""
        return f"{self.home.name}@{_HOST}"

    @property
    def password(self) -> str:
        """That of `USER`."""
        return remembered(self.home / "password", lambda: secrets.token_urlsafe(16))

    @property
    def ca(self) -> Path:
        return self.home / "tls" / "ca.crt"

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    # ------------------------------------------------------------------ making

    def make(self, settings: Mapping[str, str], plugins: Sequence[str], beside: Node | None = None) -> None:
        """Make its directory, new. `settings` and `plugins` are beside those it has anyway. With the node `beside` it,
        which exists, it can form a cluster."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(mode=0o700)
        if beside is not None:
            ports = msgspec.structs.replace(_choose_ports(), epmd=beside.ports.epmd)
            remembered(self.home / "ports", lambda: msgspec.json.encode(ports).decode())
            remembered(self.home / "password", lambda: beside.password)
            remembered(self.home / ".erlang.cookie", (beside.home / ".erlang.cookie").read_text)
        self.ca.parent.mkdir(mode=0o700)
        make_certificates(self.ca.parent)
        lines = {**self._settings(), **settings}
        conf = self.home / "rabbitmq.conf"
        conf.touch(mode=0o600)
        conf.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
        (self.home / "enabled_plugins").write_text(f"[{','.join([_STREAMS, *plugins])}].\n")
        shutil.copyfile(SCRIPT, self.home / SCRIPT.name)
        remembered(self.home / ".erlang.cookie", lambda: secrets.token_hex(20))  # else Erlang makes one, less random

    def _settings(self) -> dict[str, str]:
        ports, tls = self.ports, self.ca.parent
        return {
            "listeners.tcp.default": f"127.0.0.1:{ports.amqp}",
            "listeners.ssl.default": f"127.0.0.1:{ports.tls}",
            "ssl_options.cacertfile": f"{tls}/ca.crt",
            "ssl_options.certfile": f"{tls}/server.crt",
            "ssl_options.keyfile": f"{tls}/server.key",
            "ssl_options.verify": "verify_none",  # of clients it asks no certificate
            "ssl_options.fail_if_no_peer_cert": "false",
            "stream.listeners.tcp.1": f"127.0.0.1:{ports.stream}",
            "stream.advertised_host": "127.0.0.1",
            "stream.advertised_port": str(ports.stream),
            "default_user": USER,
            "default_pass": self.password,
            "loopback_users": "none",
            "disk_free_limit.absolute": "50MB",
        }

    def _environment(self) -> dict[str, str]:
        home, ports = self.home, self.ports
        local = "-kernel inet_dist_use_interface {127,0,0,1}"
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "ERL_EPMD_PORT": str(ports.epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP_SECONDS": "0",  # no dump
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(ports.amqp),
            "RABBITMQ_DIST_PORT": str(ports.distribution),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(home / "rabbitmq.pid"),  # removed when it shuts down; ours stays
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(home / "conf.d"),  # not what is in /etc/rabbitmq
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            # The script splits this at blanks, so the path is one without: that from the working directory.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f'{local} +S 2:2 -eval file:eval("{SCRIPT.name}").',
            "RABBITMQ_CTL_ERL_ARGS": local,
            "RABBITMQ_CTL_DIST_PORT_MIN": str(ports.tools),
            "RABBITMQ_CTL_DIST_PORT_MAX": str(ports.tools + 9),
        }

    # ------------------------------------------------------------------ running

    def starting(self) -> Steps:
        """Start it unless it runs, and wait until its clients can come."""
        if self.process() is None:
            self._launch()
        end = time.monotonic() + _START
        while not self._answers():
            if self.process() is None:
                raise RabbitServerError(f"RabbitMQ ended while it started:\n{self.said()}")
            if time.monotonic() > end:
                raise RabbitServerError(f"RabbitMQ was not up in {_START:g} s:\n{self.said()}")
            yield 0.02
        if missing := {self.ports.amqp, self.ports.tls, self.ports.stream} - self._listening():
            # Of TLS it only logs that.
            raise RabbitServerError(f"RabbitMQ does not listen on {sorted(missing)}:\n{self.said()}")

    def _listening(self) -> set[int]:
        process = self.process()
        found = process.net_connections("tcp4") if process is not None else []
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}

    def lost_a_port(self) -> bool:
        """Say, while it does not run, whether somebody else uses one of its ports."""
        return not all(map(is_free, msgspec.structs.astuple(self.ports)))

    def _launch(self) -> None:
        (self.home / SOCKET).unlink(missing_ok=True)
        (self.home / "pid").unlink(missing_ok=True)
        with self.log.open("ab", buffering=0) as log:
            log.write(_MARK.encode())
            process = subprocess.Popen(
                command(self.home, ["/bin/sh", "-c", 'echo $$ >pid && exec "$0"', str(programs() / "rabbitmq-server")]),
                cwd=self.home,
                # With `detached` the script becomes the server, instead of waiting for it; we detach it by the session.
                env={**self._environment(), "detached": "true"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                umask=0o077,
                start_new_session=True,  # what a terminal sends to the tests is not for it
            )
        _children[process.pid] = process
        while self.process() is None and process.poll() is None:
            time.sleep(0.001)  # until the shell wrote its number

    def _answers(self) -> bool:
        try:
            return evaluate(self.home, "rabbit_boot_state:get()", timeout=2.0) == "ready"
        except OSError:
            return False

    def stopping(self) -> Steps:
        """Shut it down, as `rabbitmqctl stop` does; if that fails by SIGTERM, and by SIGKILL after 20 s."""
        try:
            evaluate(self.home, "spawn(fun() -> rabbit:stop_and_halt() end)", timeout=2.0)
        except (OSError, RabbitServerError):
            self.signal(signal.SIGTERM)
        end = time.monotonic() + _STOP
        while self.process() is not None:
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
            yield 0.02

    def killing(self) -> Steps:
        """End the server (SIGKILL), as a power cut would, but for what the kernel had written."""
        self.signal(signal.SIGKILL)
        while self.process() is not None:
            yield 0.005

    def freezing(self) -> Steps:
        """Stop the server (SIGSTOP). The signal is only on its way at first: threads that run do so for a moment."""
        self.signal(signal.SIGSTOP)
        process = self.process()
        while process is not None and not _is_stopped(process.pid):
            yield 0.001

    def ending(self) -> Steps:
        """End all its processes at once (SIGKILL)."""
        looks = 2  # one that just starts another program shows no environment for a moment
        while looks:
            left = self.processes()
            looks = 2 if left else looks - 1
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            yield 0.01

    def process(self) -> psutil.Process | None:
        """The server's process, or none if it does not run."""
        for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
            del _children[pid]
        try:
            process = psutil.Process(int((self.home / "pid").read_text()))
            # It shows no environment for a moment when it becomes the next program on the way to Erlang.
            ours = process.environ().get("HOME", str(self.home)) == str(self.home)
            return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, psutil.Error):
            return None

    def processes(self) -> list[psutil.Process]:
        """All processes that run for the node."""
        found = psutil.process_iter(["environ", "status"])
        ours = [each for each in found if (each.info["environ"] or {}).get("HOME") == str(self.home)]
        return [each for each in ours if each.info["status"] != psutil.STATUS_ZOMBIE]

    def signal(self, number: signal.Signals) -> None:
        process = self.process()
        try:
            if process is not None:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            pass

    def said(self) -> str:
        """What its log tells of the last start: the first errors, or else the end."""
        try:
            lines = self.log.read_text(errors="replace").rpartition(_MARK)[2].splitlines()
        except FileNotFoundError:
            return ""
        errors = [line for line in lines if "[error]" in line]
        return "\n".join(errors[:20] or lines[-20:])[:3000]

    def ctl(self, *arguments: str) -> str:
        """Run `rabbitmqctl` (0.4 to 2 s) and return what it printed. Raises `RabbitServerError` if it fails."""
        done = subprocess.run(
            command(self.home, [str(programs() / "rabbitmqctl"), "--quiet", *arguments]),
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise RabbitServerError(f"rabbitmqctl {arguments[0]} failed ({done.returncode}): {said}")
        return done.stdout
