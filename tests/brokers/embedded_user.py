"""A process that uses an embedded server: ``python -m tests.brokers.embedded_user PATH [--fork]``.

Prints one line of JSON about the server once it can be used, and leaves when its standard input ends. With ``--fork``
a forked child, which did not join by itself, outlives it until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import asyncpg

from streamfw_postgres.embedded import embedded


async def main(path: str, fork: bool) -> None:
    async with embedded(path) as server:
        connection = await asyncpg.connect(**server.connect_arguments())
        backend = await connection.fetchval("select pg_backend_pid()")
        child = _fork() if fork else None
        print(json.dumps({"host": server.host, "backend": backend, "child": child}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _fork() -> int:
    """Fork a child that sleeps until it is killed."""
    pid = os.fork()
    if pid == 0:
        os.close(0)
        os.close(1)
        os.close(2)
        signal.pause()
    return pid


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], "--fork" in sys.argv))
