"""Running a node by the programs of another root: that of a Debian release whose RabbitMQ is newer, say.

``scripts/rabbit-root trixie DIRECTORY`` makes one, and `TEST_RABBITMQ_ROOT` names it. A node runs there by chroot, in
mounts of its own, which end with it: /proc, /dev, and all that is beside the node's home, under the same name. So
whatever looks at the node from outside, by its files, its socket and its processes, finds what it finds of others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ._rabbit_control import RabbitServerError

__all__ = ["ROOT", "command", "programs"]

ROOT = "TEST_RABBITMQ_ROOT"
"""The environment variable."""

_PROGRAMS = "/usr/lib/rabbitmq/bin"
# The shell becomes the program, so its number is that of the node, and its working directory is the same again.
_ENTER = """
set -e
root=$1 shared=$2 there=$PWD
shift 2
mkdir -p "$root$shared"
for each in /proc /dev "$shared"; do mount --rbind "$each" "$root$each"; done
exec chroot "$root" /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "$there" "$@"
"""


def _root() -> Path | None:
    found = os.environ.get(ROOT)
    return Path(found).resolve() if found else None


def programs() -> Path:
    """The directory of RabbitMQ's programs, as the node sees it. Raises `RabbitServerError` if they are missing."""
    if (root := _root()) is None:
        return _of_this_system()
    if os.geteuid() != 0:
        raise RabbitServerError(f"{ROOT} needs a user who may change roots: run the tests as root, or unset it")
    lacking = [name for name in (f"{_PROGRAMS}/rabbitmq-server", "/usr/bin/erl") if not (root / name[1:]).exists()]
    if lacking:
        raise RabbitServerError(f"{ROOT} is {root}, which lacks {', '.join(lacking)}: see scripts/rabbit-root")
    return Path(_PROGRAMS)


def _of_this_system() -> Path:
    directory = Path(os.environ.get("TEST_RABBITMQ_PROGRAMS") or _PROGRAMS)
    missing = [name for name in ("rabbitmq-server", "rabbitmqctl") if not (directory / name).is_file()]
    if missing:
        raise RabbitServerError(
            f"the tests need RabbitMQ, and {directory} lacks {', '.join(missing)}: apt-get install rabbitmq-server "
            "(or set TEST_RABBITMQ_PROGRAMS to the directory of its programs)"
        )
    if shutil.which("erl") is None:
        raise RabbitServerError("the tests need Erlang for RabbitMQ, and no erl is on the PATH: apt-get install erlang")
    return directory


def command(home: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs this one where the node's programs are; its working directory must be in `home`."""
    if (root := _root()) is None:
        return list(arguments)
    shared = Path(*home.resolve().parts[:2])
    return ["unshare", "--mount", "/bin/sh", "-c", _ENTER, "sh", str(root), str(shared), *arguments]
