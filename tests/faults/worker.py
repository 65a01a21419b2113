"""A worker process of the fault suites: ``python -m tests.faults.worker URL LEDGER LEASE FORM [POISON]``.

It handles the queue ``faults`` with eight workers; each handler takes up to 3 ms. The message whose body is POISON
kills the process. Its dead letters stay where they are. FORM is ``lease``, ``rowlock``, or ``journal``: row locks whose
attempts are counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from streamfw import App, Attempt, Message, subscriber
from streamfw_postgres import PostgresBroker
from tests.faults.ledger import Ledger, recorded

QUEUE = "faults"
ATTEMPTS = 3


class Work(msgspec.Struct):
    number: int


def main(url: str, path: str, lease: float, form: str, poison: int | None) -> None:
    ledger = Ledger(Path(path))

    attempts = ATTEMPTS if poison is not None else 1000 if form == "journal" else None

    @subscriber(QUEUE, workers=8, attempts=attempts)
    async def handle(work: Work, message: Message, attempt: Annotated[int, Attempt]) -> None:
        ledger.started(message.message_id, attempt)
        if work.number == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        pause = random.random() * 0.003
        if pause > 0.001:
            await asyncio.sleep(pause)

    broker = recorded(PostgresBroker(url, lease=lease, form="lease" if form == "lease" else "rowlock"), ledger)
    App(handle, name="faults", brokers={"default": broker}).run(wait=30)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], int(sys.argv[5]) if len(sys.argv) > 5 else None)
