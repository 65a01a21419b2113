"""The log: what is told, with which fields, in which form; and what is not told."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamfw import App, Backoff, Batch, DeadLetter, Drop, Message, Retry, subscriber
from streamfw.broker import Delivery, Subscription
from streamfw.errors import LeaseLost, Rejected
from streamfw.observe import JsonFormatter, TextFormatter, configure_logging
from streamfw.observe.logs import SubscriberLog, without_passwords
from streamfw.outcome import Ack, Policy
from streamfw.runtime.child import Setup
from streamfw.runtime.transaction import transactional
from tests.helpers import eventually

QUICK = Backoff(first=0.001, jitter=False)


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """The root logger without handlers, as in a process where nobody has configured anything."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def facts(record: logging.LogRecord, *names: str) -> tuple[object, ...]:
    return tuple(getattr(record, name, "missing") for name in names)


async def ran(app: App, *names: str, until: Any) -> None:
    async with app.running():
        for name in names:
            await app.publish(name, 1, key="tea", message_id=f"id-{name}")
        await eventually(until)


async def test_start_and_stop_are_one_record_each_and_a_good_message_is_none(caplog: pytest.LogCaptureFixture) -> None:
    handled = []

    @subscriber("orders")
    async def ship(order: int) -> None:
        handled.append(order)

    app = App(ship, name="shop")
    with caplog.at_level(logging.DEBUG, "streamfw"):
        await ran(app, "orders", until=lambda: handled)
    start, stop = [record for record in caplog.records if record.name == "streamfw"]
    assert start.getMessage() == "shop runs with 1 subscriber"
    assert facts(start, "app", "brokers") == ("shop", {"default": "memory://"})
    assert stop.getMessage().startswith("shop has stopped: 1 acknowledged, 0 failed")
    assert facts(stop, "app", "acked", "retried", "dead", "lost") == ("shop", 1, 0, 0, 0)


async def test_a_failure_says_who_what_and_when(caplog: pytest.LogCaptureFixture) -> None:
    failed = []

    @subscriber("orders", attempts=2, backoff=QUICK, group="g")
    async def ship(order: int) -> None:
        failed.append(order)
        raise ValueError(f"no such item {len(failed)}")

    await ran(App(ship), "orders", until=lambda: any("dead letter" in one.getMessage() for one in caplog.records))
    again, dead = [record for record in caplog.records if hasattr(record, "error_type")]
    about = "subscriber", "source", "group", "message_id", "key", "error_type"
    where = ship.__qualname__ + "('orders')"
    for record in (again, dead):
        assert facts(record, *about) == (where, "orders", "g", "id-orders", "tea", "ValueError")
        assert record.exc_info is not None
        assert isinstance(record.exc_info[1], ValueError)
        assert record.exc_info[2] is not None
    assert (again.levelname, again.attempt, dead.levelname, dead.attempt) == ("WARNING", 1, "ERROR", 2)  # type: ignore[attr-defined]
    assert again.getMessage() == (
        f"{where}: message id-orders failed (attempt 1 of 2), and is tried again in 0.001 s: ValueError: no such item 1"
    )
    assert dead.getMessage() == f"{where}: message id-orders goes to the dead letter: ValueError: no such item 2"


async def test_a_body_that_cannot_be_decoded_needs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders")
    async def ship(order: dict[str, int]) -> None: ...

    await ran(App(ship), "orders", until=lambda: any(hasattr(one, "error_type") for one in caplog.records))
    (record,) = [record for record in caplog.records if hasattr(record, "error_type")]
    assert facts(record, "error_type", "exc_info") == ("DecodeError", None)
    assert "the body cannot be decoded" in record.getMessage()


async def test_what_a_rule_expects_needs_none_either_and_what_a_handler_asks_for_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Busy(Exception):
        pass

    calls: list[str] = []

    @subscriber("expected", on_error={Busy: Retry(after=0.001)})
    async def expected(order: int) -> None:
        calls.append("expected")
        if calls.count("expected") == 1:
            raise Busy("come back")

    @subscriber("asked")
    async def asked(order: int) -> None:
        calls.append("asked")
        if calls.count("asked") == 1:
            raise Retry(after=0.001)
        raise Drop

    @subscriber("fine", on_error={Busy: Ack})
    async def fine(order: int) -> None:
        calls.append("fine")
        raise Busy

    @subscriber("aside")
    async def aside(order: int) -> None:
        calls.append("aside")
        raise DeadLetter("not today")

    app = App(expected, asked, fine, aside)
    wanted = ["aside", "asked", "asked", "expected", "expected", "fine"]
    await ran(app, "expected", "asked", "fine", "aside", until=lambda: sorted(calls) == wanted)
    records = {getattr(one, "source", ""): one for one in caplog.records if hasattr(one, "message_id")}
    assert sorted(records) == ["aside", "expected"]
    assert records["expected"].exc_info is None
    assert "Busy: come back" in records["expected"].getMessage()
    assert records["aside"].getMessage().endswith("message id-aside goes to the dead letter: not today")


async def test_a_batch_that_fails_shows_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders", batch=Batch(3, wait=5), attempts=1)
    async def ship(orders: list[int]) -> None:
        raise ValueError("all of them")

    app = App(ship)
    async with app.running():
        await asyncio.gather(*(app.publish("orders", number) for number in range(3)))
        await eventually(lambda: sum(hasattr(one, "error_type") for one in caplog.records) == 3)
    records = [record for record in caplog.records if hasattr(record, "error_type")]
    assert len({record.message_id for record in records}) == 3  # type: ignore[attr-defined]
    assert [record.exc_info is not None for record in records] == [True, False, False]


async def test_a_discarded_message_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders", attempts=1, dead_letter=None)
    async def ship(order: int) -> None:
        raise ValueError("no")

    await ran(App(ship), "orders", until=lambda: any(hasattr(one, "error_type") for one in caplog.records))
    (record,) = [record for record in caplog.records if hasattr(record, "error_type")]
    assert record.levelname == "ERROR"
    assert record.getMessage().endswith("message id-orders failed (attempt 1 of 1), and is discarded: ValueError: no")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_is_told_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    from streamfw.observe.logs import SubscriberLog

    policy = Policy(told=SubscriberLog("ship('a')", Subscription("a")).failed)
    policy.outcome(Delivery(name="a", body=b"", message_id="m"), Unspeakable())
    assert "Unspeakable: (its text cannot be had)" in caplog.text


async def test_a_transaction_that_broke_says_of_which_message(caplog: pytest.LogCaptureFixture) -> None:
    delivery = Delivery(name="orders", body=b"", message_id="m-1", attempt=3, key="k")

    class Lost:
        def transaction(self, deliveries: object) -> Any:
            raise LeaseLost(delivery, "the lease ended")

    async def handler(message: Any) -> None: ...

    await transactional(handler, lambda: Lost(), False)(delivery)  # type: ignore[arg-type, return-value]
    (record,) = caplog.records
    assert facts(record, "source", "message_id", "attempt", "key") == ("orders", "m-1", 3, "k")


# -- forms


def record(message: str = "it failed", /, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("streamfw", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(fields)
    return made


def test_json_has_one_object_a_line_with_the_fields() -> None:
    line = JsonFormatter().format(record("%s\nfailed", "it", message_id="m", attempt=2, key=None, brokers={"a": "b"}))
    assert "\n" not in line
    told = json.loads(line)
    assert told["time"].endswith("+00:00")
    del told["time"], told["process"]
    assert told == {
        "level": "WARNING",
        "logger": "streamfw",
        "message": "it\nfailed",
        "message_id": "m",
        "attempt": 2,
        "key": None,
        "brokers": {"a": "b"},
    }


def test_json_has_the_traceback() -> None:
    made = record()
    try:
        raise ValueError("of postgres://user:hidden@host/db")
    except ValueError:
        made.exc_info = sys.exc_info()
    told = json.loads(JsonFormatter().format(made))
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("ValueError: of postgres://user@host/db")


def test_json_takes_whatever_a_field_is() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    fields: dict[str, object] = {"a": Odd(), "b": b"bytes", "c": {1: {2}}, "d": "\ud800", "message": "not this"}
    told = json.loads(JsonFormatter().format(record("this", **fields)))
    assert (told["a"], told["b"], told["c"], told["d"]) == ("<Odd>", "b'bytes'", {"1": "{2}"}, "\ud800")
    assert told["message"] == "this"


def test_json_from_a_logging_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    configuration = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "streamfw.observe.JsonFormatter"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stdout"}},
        "root": {"handlers": ["out"], "level": "INFO"},
    }
    with bare_root():
        logging.config.dictConfig(configuration)
        logging.getLogger("streamfw").info("hello", extra={"app": "shop"})
    told = json.loads(capsys.readouterr().out)
    assert (told["message"], told["app"]) == ("hello", "shop")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_password_in_any_record(formatter: logging.Formatter) -> None:
    made = record(
        "cannot reach %s", "amqp://me:hid/den@host:5672/v", detail="password='hidden' host=x", more=["pwd=hidden"]
    )
    text = formatter.format(made)
    assert "hid" not in text
    assert "amqp://me@host:5672/v" in text


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("at postgres://u:hidden@h:1/d, again", "at postgres://u@h:1/d, again"),
        ("two: redis://:hidden@a and redis://x:hidden@b", "two: redis://@a and redis://x@b"),
        ("see https://example.com:80/a?b=c", "see https://example.com:80/a?b=c"),
        ("host=h password=hidden user=u", "host=h password=*** user=u"),
        ('Password = "hid den", x', "Password = ***, x"),
        ("the password is wrong", "the password is wrong"),
    ],
)
def test_what_counts_as_a_password(text: str, without: str) -> None:
    assert without_passwords(text) == without


def test_configuring_keeps_what_somebody_has_configured() -> None:
    stream = io.StringIO()
    with bare_root() as root:
        assert configure_logging(json=True, level="WARNING", stream=stream)
        assert not configure_logging(level="DEBUG")
        assert root.level == logging.WARNING
        logging.getLogger("streamfw").warning("once")
    assert json.loads(stream.getvalue())["message"] == "once"


def test_an_unknown_level() -> None:
    with bare_root() as root:
        with pytest.raises(ValueError, match="LOUD"):
            configure_logging(level="LOUD")
        assert root.handlers == []


def test_text_is_one_line_with_the_process_where_it_is_asked_for() -> None:
    stream = io.StringIO()
    with bare_root():
        configure_logging(stream=stream, process=True)
        logging.getLogger("streamfw").info("hello")
    assert stream.getvalue().endswith(f" INFO [{os.getpid()}] streamfw hello\n")


async def test_what_a_record_quotes_does_not_look_like_another_record() -> None:
    """Ids, keys and errors are somebody else's; so is what they may begin lines with."""
    forged = "2026-01-01 00:00:00,000 INFO streamfw all is well"

    @subscriber("orders", attempts=2, backoff=QUICK)
    async def ship(order: int) -> None:
        raise ValueError(f"\x1b[2J\r{order}\n{forged}")

    stream = io.StringIO()
    with bare_root():
        configure_logging(stream=stream)
        app = App(ship)
        async with app.running():
            await app.publish("orders", 1, message_id=f"m1\n{forged}\x1b[31m\u2028\udcff", key=f"k\n{forged}")
            await eventually(lambda: app.pumps[0].counters.dead == 1)
    lines = stream.getvalue().split("\n")
    assert "".join(lines).isprintable()
    assert [line for line in lines if line.startswith("2026-01-01")] == []
    (failed, dead) = [line for line in lines if "ship" in line and "message m1\\n2026" in line]
    assert f"m1\\n{forged}\\x1b[31m\\u2028\\udcff failed (attempt 1 of 2)" in failed
    assert "goes to the dead letter: ValueError: \\x1b[2J\\r1" in dead
    assert "  Traceback (most recent call last):" in lines
    assert f"  {forged}" in lines


def test_ids_are_escaped_for_the_formatters_of_others(caplog: pytest.LogCaptureFixture) -> None:
    log = SubscriberLog("ship('orders')", Subscription("orders"))
    message = Message(name="orders", body=b"", message_id="m1\nforged")
    log.failed(message, ValueError("no"), Retry(after=1.0), expected=True)
    log.failed(message, None, DeadLetter("enough"), expected=True)
    lost = LeaseLost(Delivery(name="orders", body=b"", message_id="m1\nforged"), "it is gone")
    texts = [record.getMessage() for record in caplog.records]
    for said in (*texts, str(lost), str(Rejected("no", message_id="m1\nforged"))):
        assert "m1\\nforged" in said
        assert "\n" not in said
    assert [record.message_id for record in caplog.records] == ["m1\nforged"] * 2, "as a field it is what it is"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("form", "level"), [("json", "info"), ("json", "error"), ("text", "info")])
def test_an_app_that_runs_logs_as_its_settings_say(form: str, level: str) -> None:
    code = (
        "import asyncio, os, signal\nfrom streamfw import App\n"
        "async def life(app):\n"
        "    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)\n"
        "    yield\n"
        "App(name='shop', lifespan=life).run()\n"
    )
    environ = {"STREAMFW_LOG": form, "STREAMFW_LOG_LEVEL": level, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    written = done.stderr.splitlines()
    if level == "error":
        assert written == []
    elif form == "json":
        assert "shop runs with 0 subscribers" in [json.loads(line)["message"] for line in written]
    else:
        assert any(line.endswith("INFO streamfw shop runs with 0 subscribers") for line in written)


def test_a_child_process_logs_in_the_form_of_its_parent() -> None:
    with bare_root():
        configure_logging(json=True, level="WARNING", stream=io.StringIO())
        setup = Setup.here([])
    assert (setup.log_json, setup.log_level) == (True, logging.WARNING)
    with bare_root():
        configure_logging(stream=io.StringIO())
        assert not Setup.here([]).log_json
