"""The command line, ``streamfw``; it needs the extra ``cli`` (typer and rich).

    streamfw run MODULE:APP          run an app, in one process or several, or with --reload
    streamfw check MODULE:APP        build it; say what it subscribes to, and what is guaranteed
    streamfw publish NAME BODY       publish a message
    streamfw dlq list|show|requeue|purge NAME
    streamfw postgres migrate|status
    streamfw kafka status|seek

Nothing else in streamfw imports this package, and it imports typer and rich only when `main` runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (default: the process's), and exit.

    Exit codes: 0 done, 1 an error (said on stderr), 2 a wrong command line, 130 ended by a second signal.
    """
    try:
        from .program import program
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"streamfw: the command line needs {package}; install it with: pip install 'streamfw[cli]'", file=sys.stderr
        )
        sys.exit(1)
    from .completion import completing

    with completing(os.environ):
        program(None if arguments is None else list(arguments), prog_name="streamfw")
    sys.exit(0)
