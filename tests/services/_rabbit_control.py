"""Asking a RabbitMQ test node by Erlang expressions.

`rabbitmqctl` starts an Erlang of its own for every call, 0.4 to 2 s; this is a Unix socket that the node's own Erlang
listens on (`SCRIPT`), and an answer takes 0.1 ms. It is there once the node has booted.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

__all__ = ["SCRIPT", "SOCKET", "RabbitServerError", "evaluate", "term"]

SCRIPT = Path(__file__).parent / "rabbit_server" / "control.erl"
SOCKET = "control"

_LENGTH = struct.Struct(">I")


class RabbitServerError(Exception):
    """The test server cannot be had, or refused something; the message says why and what to do."""


def evaluate(directory: Path, expressions: str, timeout: float = 30.0) -> str:
    """Evaluate Erlang expressions in the node whose working directory this is; return the value as Erlang writes it.

    Raises `OSError` if no node listens, or answers in `timeout` seconds, and `RabbitServerError` for what they raise.
    """
    frame = f"{expressions}.".encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(directory / SOCKET))
        connection.sendall(_LENGTH.pack(len(frame)) + frame)
        (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        kind, _, value = _receive(connection, length).decode().partition(" ")
    if kind != "ok":
        raise RabbitServerError(f"the node answered {value}")
    return value


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionResetError("the node closed its control socket")
        data += more
    return bytes(data)


def term(text: str) -> str:
    """Text as Erlang writes a binary."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'<<"{escaped}"/utf8>>'
