"""Running the programs of a Postgres server as its account, and looking at processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ._embedded_binaries import Account, can_enter
from ._embedded_steps import POLL, EmbeddedError, Steps

__all__ = ["WORKING_DIRECTORY", "Programs", "lives", "works_in"]

WORKING_DIRECTORY = Path("/proc/self/cwd")
"""A name of the working directory that needs no permission on the way to it (Linux)."""

_LOG_LIMIT = 16 << 20
"""Bytes after which a start moves the log to ``server.log.1``."""


class Programs:
    """The programs in `binaries`, run as `account`, writing to `log`."""

    def __init__(self, binaries: Path, account: Account, log: Path) -> None:
        self.binaries = binaries
        self.account = account
        self.log = log

    def major_version(self) -> int:
        """Return the major version of the programs (18, say)."""
        text = subprocess.run(
            [self.binaries / "postgres", "--version"],
            capture_output=True,
            text=True,
            cwd="/",
            env=_environment(),
            check=False,
            **self.account.run_as(),
        ).stdout
        number = text.partition("PostgreSQL) ")[2].partition(".")[0]
        if not number.isdecimal():
            raise EmbeddedError(f"{self.binaries}/postgres does not run: it told no version ({text.strip()!r})")
        return int(number)

    def execute(
        self, program: str, arguments: Sequence[str], data: Path, *, lock: int, stdin: int = subprocess.DEVNULL
    ) -> Steps:
        """Run `program` on the data directory until it ends; it inherits `lock`. Raises `EmbeddedError` if it fails."""
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                [self.binaries / program, "-D", str(self._name_of(data)), *arguments],
                cwd=data,
                stdin=stdin,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C in our terminal is not for the server
                umask=0o077,
                env=_environment(),
                **self.account.run_as(),
            )
        except OSError as error:
            raise EmbeddedError(f"cannot run {self.binaries}/{program} as {self.account.name!r}: {error}") from error
        finally:
            os.close(log)
        try:
            while process.poll() is None:
                yield POLL
        finally:
            if process.poll() is None:  # given up: with the programs that it runs itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode != 0:
            raise EmbeddedError(f"{program} failed on {data} (exit {process.returncode}); {self.log_says()}")

    def _name_of(self, data: Path) -> Path:
        if can_enter(self.account, data):
            return data
        if WORKING_DIRECTORY.exists():
            return WORKING_DIRECTORY
        raise EmbeddedError(
            f"the account {self.account.name!r}, which root runs the server as, cannot enter {data.parent}: "
            "use a directory that it can enter"
        )

    def rotate_log(self) -> None:
        """Move a long log away; called while no server writes into it."""
        with suppress(FileNotFoundError):
            if self.log.stat().st_size > _LOG_LIMIT:
                self.log.replace(self.log.with_name(self.log.name + ".1"))

    def log_says(self, lines: int = 15) -> str:
        """Return the last lines of the log, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                tail = "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return f"{self.log} does not exist"
        return f"{self.log} ends with:\n{tail}"


def _environment() -> dict[str, str]:
    """What a server needs of our environment; PGDATA, PGPORT and their kind would change what it does."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ", "TMPDIR") if name in os.environ}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", **kept}


def lives(pid: int) -> bool:
    """Say whether the process exists and is no zombie (in many a container nobody waits for those)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another account
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, IndexError, ProcessLookupError):
        return not WORKING_DIRECTORY.exists()


def works_in(pid: int, directory: Path) -> bool:
    """Say whether `directory` is the working directory of the process, as far as we may know."""
    try:
        return os.path.samefile(f"/proc/{pid}/cwd", directory)
    except OSError:
        return False  # it is gone, or of another account
