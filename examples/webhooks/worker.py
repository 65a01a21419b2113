"""A worker of the demo: the service, as a process that ends with the one that started it."""

from __future__ import annotations

import os
import signal
import threading

from .service import app


def end_with_parent() -> None:
    """Standard input is a pipe from the demo. It ends when the demo is gone, however it went."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    app.run()
