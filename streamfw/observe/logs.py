"""The log: what a record carries, and two formatters.

Everything is logged as ``streamfw`` by the standard library's `logging`. Nothing is logged for a message that is
handled well. Records about a subscriber carry what they are about as fields, for whoever filters or counts by them:

    subscriber                  the handler and what it subscribes to
    source                      what its messages were published to
    group                       who competes for them
    message_id, attempt, key    where the record is about one message
    error_type                  where something failed
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from streamfw.errors import StreamError, redact
from streamfw.outcome import DeadLetter, Drop, Outcome, Retry
from streamfw.texts import one_line, printable

if TYPE_CHECKING:
    from streamfw.broker import Subscription
    from streamfw.message import Message

__all__ = [
    "JsonFormatter",
    "SubscriberLog",
    "TextFormatter",
    "about",
    "configure_logging",
    "logs_json",
    "without_passwords",
]

logger = logging.getLogger("streamfw")
MOST_TEXT: Final = 1024  # characters of an error's own text
_TOLD: Final = "_streamfw_told"  # set on an error whose traceback stands in the log already


def about(message: Message) -> dict[str, object]:
    """The fields of a record about `message`."""
    return {
        "source": message.name,
        "message_id": message.message_id,
        "attempt": message.attempt,
        "key": message.key,
    }


class SubscriberLog:
    """Logs for one subscriber: a record begins with who it is about, and has the facts as fields."""

    def __init__(self, where: str, subscription: Subscription) -> None:
        self._where, self._attempts = where, subscription.attempts
        self._facts = {"subscriber": where, "source": subscription.name, "group": subscription.group}

    def __call__(
        self, level: int, text: str, *args: object, message: Message | None = None, error: BaseException | None = None
    ) -> None:
        """Log `text` (with %-style `args`), about `message` where there is one, with the type of `error`."""
        self._write(level, text, args, message, error, trace=False)

    def failed(self, message: Message, error: BaseException | None, outcome: Outcome, expected: bool) -> None:
        """`message` failed with `error`, or (None) its handler asked for `outcome`. `expected`: by a rule of
        ``on_error=``, so nobody needs a traceback."""
        identity = one_line(message.message_id)
        args: tuple[object, ...]
        if isinstance(outcome, DeadLetter):
            level, text, args = logging.ERROR, "message %s goes to the dead letter: %s", (identity, outcome.reason)
        elif error is None:
            return  # whoever asks for another try, or drops, knows what it does
        elif isinstance(outcome, Retry):
            level, text = logging.WARNING, "message %s failed (attempt %s), and is tried again in %.3g s: %s"
            args = (identity, self._attempt(message), outcome.after or 0.0, _brief(error))
        elif isinstance(outcome, Drop):
            level, text = logging.ERROR, "message %s failed (attempt %s), and is discarded: %s"
            args = (identity, self._attempt(message), _brief(error))
        else:
            return  # on_error= calls it done
        self._write(level, text, args, message, error, trace=not expected)

    def _write(
        self,
        level: int,
        text: str,
        args: tuple[object, ...],
        message: Message | None,
        error: BaseException | None,
        trace: bool,
    ) -> None:
        if not logger.isEnabledFor(level):
            return
        facts: dict[str, object] = {**about(message), **self._facts} if message is not None else dict(self._facts)
        if error is not None:
            facts["error_type"] = type(error).__qualname__
        shown = error if trace and error is not None and _has_news(error) else None
        logger.log(level, f"%s: {text}", self._where, *args, extra=facts, exc_info=shown, stacklevel=3)

    def _attempt(self, message: Message) -> str:
        return str(message.attempt) if self._attempts is None else f"{message.attempt} of {self._attempts}"


def _has_news(error: BaseException) -> bool:
    """Whether the traceback of `error` says something that the log does not: not for our own, and once a batch."""
    if isinstance(error, StreamError) or error.__traceback__ is None or hasattr(error, _TOLD):
        return False
    setattr(error, _TOLD, True)
    return True


def _brief(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # anybody may write a __str__ that fails
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"[:MOST_TEXT]


# -- formatting

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_SECRET = re.compile(
    r"(?i)\b(pass(?:word|wd|phrase)?|pwd|secret|token|api_?key)(\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s,;&)}\]]+)"
)


def without_passwords(text: str) -> str:
    """`text` without the passwords of the URLs in it, and without what follows a ``password=``.

    A last resort: what streamfw logs has none. It is for records of others, and for errors that quote what they got.
    """
    if "://" in text:
        text = _URL.sub(lambda url: redact(url[0]) if "@" in url[0] else url[0], text)
    return _SECRET.sub(r"\1\2***", text)


class TextFormatter(logging.Formatter):
    """One line a record, without passwords. `process`: with the number of the process.

    What has more lines (a traceback) is indented below it, and control characters are shown as escapes: so nothing that
    a record quotes looks like another record.
    """

    def __init__(self, process: bool = False) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {'[%(process)d] ' if process else ''}%(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return printable(without_passwords(super().format(record))).replace("\n", "\n  ")


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line, without passwords: ``time`` (UTC), ``level``, ``logger``, ``message``, ``process``, the
    fields that the record carries, and ``exception`` with the traceback.

    For `logging.config.dictConfig`: ``"formatters": {"json": {"()": "streamfw.observe.JsonFormatter"}}``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        told |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in told}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = self.formatStack(record.stack_info)
        # Pure ASCII: a lone surrogate from somebody's key must not fail in the stream.
        return json.dumps(_clean(told), default=_as_text)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, dict):
        fields: dict[Any, Any] = value
        return {str(name): _clean(one) for name, one in fields.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in cast("list[Any]", value)]
    return value


def _as_text(value: object) -> str:
    try:
        return without_passwords(str(value))
    except Exception:  # a field of somebody's own
        return f"<{type(value).__name__}>"


def configure_logging(
    json: bool = False, level: int | str = logging.INFO, *, process: bool = False, stream: TextIO | None = None
) -> bool:
    """Log to standard error (or `stream`), as text or as one JSON object a line; whether it did.

    Does nothing where the root logger has handlers already, so that an application's own configuration holds. `process`
    puts the number of the process into the text (in JSON it always is). Raises `ValueError` for an unknown level.
    """
    root = logging.getLogger()
    if root.handlers:
        return False
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if json else TextFormatter(process))
    root.setLevel(level)
    root.addHandler(handler)
    return True


def logs_json() -> bool:
    """Whether this process logs as JSON: a child of it should, too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
