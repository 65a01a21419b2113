"""One server for several processes: the first user brings it up, the last one takes it down.

Theory of operation. A directory holds two locks (flock, so the kernel gives them back when a process is killed):

- ``start.lock``, exclusive, is the *turn*: held while a user joins or leaves, so that nobody joins a server that
  is being stopped. It holds the pid of its holder, for messages.
- ``users.lock``, shared, is held by each user for as long as it uses the server. Who leaves asks for it exclusively:
  who gets it was the last and stops the server. A user that was killed holds nothing and so cannot be counted.

``users/<pid>-<random>`` names each user, for messages and for the person who looks; the locks alone decide. When all
users are killed the server goes on, and the next user finds it, joins it, and stops it when it is the last.

A fork without exec carries a copy of the user's lock. It counts as the same user: it must join by itself if it is to
go on when its parent leaves. The directory must be on a local file system.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Generator
from pathlib import Path

from ._embedded_process import lives
from ._embedded_steps import POLL, EmbeddedError, Steps, lock_file, try_lock

__all__ = ["Shared"]


class Shared:
    """One user of the thing that `directory` stands for. Use it once: `join`, then `leave`.

    `patience` is how long, in seconds, to wait for another user that is joining or leaving.
    `mode` is that of the directory if it has to be made.
    """

    def __init__(self, directory: Path, *, patience: float = 240.0, mode: int = 0o700) -> None:
        self._directory = directory
        self._patience = patience
        self._mode = mode
        self._use: int | None = None
        self._name: Path | None = None

    def join(self, start: Callable[[], Steps]) -> Steps:
        """Become a user and run `start` (which finds the server running, or starts it) while nobody else can leave.

        Call `leave` also when this raised: the work may have ended half way.
        """
        turn = yield from self._turn()
        try:
            self._use = yield from self._lock(self._directory / "users.lock", fcntl.LOCK_SH)
            self._name = self._register()
            yield from start()
        finally:
            _release(turn)

    def leave(self, stop: Callable[[], Steps]) -> Steps:
        """Stop being a user; run `stop` if there is no other. Does nothing for who never joined."""
        use, self._use = self._use, None
        if use is None:
            return
        try:
            turn = yield from self._turn()
            try:
                if self._name is not None:
                    self._name.unlink(missing_ok=True)
                if try_lock(use, fcntl.LOCK_EX):
                    yield from stop()
            finally:
                _release(turn)
        finally:
            _release(use)

    def users(self) -> list[int]:
        """Return the pids of the users that live, this one included."""
        return sorted(pid for pid, _ in self._registered() if lives(pid))

    def _register(self) -> Path:
        names = self._directory / "users"
        names.mkdir(mode=0o700, exist_ok=True)
        for pid, name in self._registered():
            if not lives(pid):
                name.unlink(missing_ok=True)
        name = names / f"{os.getpid()}-{secrets.token_hex(4)}"
        name.touch(mode=0o600)
        return name

    def _registered(self) -> list[tuple[int, Path]]:
        try:
            names = list((self._directory / "users").iterdir())
        except FileNotFoundError:
            return []
        found = ((name.name.partition("-")[0], name) for name in names)
        return [(int(pid), name) for pid, name in found if pid.isdecimal()]

    def _turn(self) -> Generator[float, None, int]:
        turn = yield from self._lock(self._directory / "start.lock", fcntl.LOCK_EX)
        os.ftruncate(turn, 0)
        os.pwrite(turn, b"%d\n" % os.getpid(), 0)
        return turn

    def _lock(self, path: Path, kind: int) -> Generator[float, None, int]:
        end = time.monotonic() + self._patience
        while True:
            self._directory.mkdir(mode=self._mode, parents=True, exist_ok=True)
            fd = lock_file(path)
            try:
                while not try_lock(fd, kind):
                    if time.monotonic() > end:
                        raise EmbeddedError(self._too_long(path, fd))
                    yield POLL
            except BaseException:
                os.close(fd)
                raise
            if _is_at(fd, path):
                return fd
            os.close(fd)  # the directory was removed meanwhile: this lock guards nothing

    def _too_long(self, path: Path, fd: int) -> str:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        who = f"process {holder}" if path.name == "start.lock" and holder else f"one of the processes {self.users()}"
        return f"{path} was held by {who} for more than {self._patience:g} s: end that process, or wait and try again"


def _release(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave the lock with a forked child's copy
    os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
