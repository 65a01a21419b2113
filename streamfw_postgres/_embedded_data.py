"""The data directory of an embedded server: made whole or not at all, and never opened by the wrong version or account.

`initdb` works in ``data.new.*``, which is renamed when it is complete. Half-finished ones are thrown away by the next
start. The caller holds the server's lock, and so does `initdb`: one that outlives us keeps the next start waiting.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from ._embedded_binaries import Account
from ._embedded_process import Programs
from ._embedded_steps import POLL, EmbeddedError, Steps

__all__ = ["ensure_data"]


def ensure_data(programs: Programs, data: Path, *, user: str, password: str, sync: bool, lock: int) -> Steps:
    """Make the data directory with `user` as its superuser, or see that the one that is there can be used."""
    for unfinished in data.parent.glob(f"{data.name}.new.*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    if data.exists():
        _check(programs, data)
        return
    account = programs.account
    unfinished = data.with_name(f"{data.name}.new.{secrets.token_hex(4)}")
    unfinished.mkdir(mode=0o700)
    try:
        if not account.is_us:
            os.chown(unfinished, account.uid, account.gid)
        yield from _initdb(programs, unfinished, user, password, sync, lock)
        unfinished.rename(data)
    except BaseException:
        _remove(unfinished)
        raise
    if sync:
        _sync_directory(data.parent)


def _remove(unfinished: Path) -> None:
    """Remove what a killed `initdb` made; its processes may write a last file after they were killed."""
    for _ in range(100):
        shutil.rmtree(unfinished, ignore_errors=True)
        if not unfinished.exists():
            return
        time.sleep(POLL)


def _check(programs: Programs, data: Path) -> None:
    owner = data.stat().st_uid
    if owner != programs.account.uid:
        raise EmbeddedError(
            f"{data} belongs to the account {Account.of(owner).name!r}, the server would run as "
            f"{programs.account.name!r}: run as that account, or use another directory"
        )
    try:
        version = (data / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise EmbeddedError(
            f"{data} is not a Postgres data directory (no PG_VERSION): move it away, or use another directory"
        ) from None
    installed = programs.major_version()
    if version != str(installed):
        raise EmbeddedError(
            f"{data} was made by Postgres {version}, the installed server is {installed}: use a server of version "
            f"{version} (dump with it, then restore), or use another directory"
        )


def _initdb(programs: Programs, target: Path, user: str, password: str, sync: bool, lock: int) -> Steps:
    locale = ["--locale=C"]
    if programs.major_version() >= 17:
        locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    arguments = ["-U", user, "-A", "scram-sha-256", "--pwfile=/dev/stdin", "-E", "UTF8", *locale]
    if not sync:
        arguments.append("--no-sync")
    reader = _pipe_with(password.encode() + b"\n", programs.account)
    try:
        yield from programs.execute("initdb", arguments, target, stdin=reader, lock=lock)
    finally:
        os.close(reader)


def _pipe_with(content: bytes, account: Account) -> int:
    """Return the reading end of a pipe that holds `content`: a password is never in a file of others or an argument."""
    reader, writer = os.pipe()
    try:
        if not account.is_us:
            os.fchown(reader, account.uid, account.gid)  # /dev/stdin is opened anew, which only its owner may
        os.write(writer, content)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return reader


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
