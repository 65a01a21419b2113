"""The suite itself: each of these faults, put into a sound broker, is found by the test that is there for it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from streamfw import memory
from streamfw._memory_store import Queue, Store, Stored
from streamfw.broker import Broker, Delivery, Settlement, Subscription
from streamfw.errors import BrokerClosed, PublishError, Rejected, SettleError
from streamfw.memory import MemoryBroker, MemoryConnection, MemorySource
from streamfw.message import Headers, Outgoing
from streamfw.outcome import ACK, RELEASE, DeadLetter, Retry
from streamfw.testing.conformance import BrokerConformance

Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: list[tuple[Fault, str]] = []


def found_by(*tests: str) -> Callable[[Fault], Fault]:
    def mark(fault: Fault) -> Fault:
        FAULTS.extend((fault, test) for test in tests)
        return fault

    return mark


settle, fetch, close, stop = MemorySource.settle, MemorySource.fetch, MemorySource.close, MemorySource.stop
publish, add, put, bury = MemoryConnection.publish, Store.add, Queue.put, Store.bury


def changing_outcomes(patch: pytest.MonkeyPatch, change: Callable[[Settlement], Settlement | None]) -> None:
    async def changed(self: MemorySource, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        return await settle(self, [new for old in settlements if (new := change(old)) is not None])

    patch.setattr(MemorySource, "settle", changed)


@found_by("test_what_ended_does_not_come_back", "test_flush_and_close_lose_no_settlement", "test_a_drain_loses_nothing")
def acknowledgements_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    changing_outcomes(patch, lambda s: None if s.outcome is ACK else s)


@found_by("test_the_pause_of_a_retry")
def a_retry_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    changing_outcomes(patch, lambda s: Settlement(s.delivery, Retry(0.0)) if isinstance(s.outcome, Retry) else s)


@found_by("test_a_retry_comes_back_and_counts")
def a_retry_counts_nothing(patch: pytest.MonkeyPatch) -> None:
    changing_outcomes(patch, lambda s: Settlement(s.delivery, RELEASE) if isinstance(s.outcome, Retry) else s)


@found_by("test_a_release_comes_back_uncounted")
def a_release_counts(patch: pytest.MonkeyPatch) -> None:
    changing_outcomes(patch, lambda s: Settlement(s.delivery, Retry(0.0)) if s.outcome is RELEASE else s)


@found_by("test_an_outcome_not_declared_is_refused", "test_a_delay_is_kept_or_refused", "test_a_delayed_publish")
def it_can_more_than_it_says(patch: pytest.MonkeyPatch) -> None:
    less = msgspec.structs.replace(MemoryBroker.capabilities, retry=False, delay=None, release=False)
    patch.setattr(MemoryBroker, "capabilities", less)


@found_by("test_lanes", "test_nobody_overtakes_what_is_out")
def it_says_more_than_it_can(patch: pytest.MonkeyPatch) -> None:
    def no_order(self: Queue, member: object, ordered: bool) -> None:
        member._ordered = False  # type: ignore[attr-defined]
        self._members[member] = False

    patch.setattr(Queue, "join", no_order)


@found_by("test_nobody_overtakes_what_is_out", "test_a_key_is_in_order_over_the_members")
def every_member_of_an_ordered_group_takes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queue, "serves", lambda self, member: True)

    def wake_all(self: Queue) -> None:
        for member in list(self._waiting):
            self.interrupt(member)

    patch.setattr(Queue, "wake", wake_all)


@found_by("test_unsettled_deliveries_come_back_when_their_source_closes", "test_a_cancelled_handler_settles_nothing")
def close_acknowledges_what_is_out(patch: pytest.MonkeyPatch) -> None:
    async def acknowledging(self: MemorySource) -> None:
        self._out.clear()
        await close(self)

    patch.setattr(MemorySource, "close", acknowledging)


@found_by("test_unsettled_deliveries_come_back_when_their_source_closes", "test_a_cancelled_handler_settles_nothing")
def close_counts_an_attempt(patch: pytest.MonkeyPatch) -> None:
    async def counting(self: MemorySource) -> None:
        for delivery in self._out.values():
            delivery.stored.attempt += 1
        await close(self)

    patch.setattr(MemorySource, "close", counting)


@found_by("test_stop_keeps_what_is_out")
def stop_gives_back_what_is_out(patch: pytest.MonkeyPatch) -> None:
    async def releasing(self: MemorySource) -> None:
        await stop(self)
        await close(self)

    patch.setattr(MemorySource, "stop", releasing)


@found_by("test_stop_ends_a_pending_fetch")
def stop_does_not_wake(patch: pytest.MonkeyPatch) -> None:
    async def asleep(self: MemorySource) -> None:
        self._stopped = True

    patch.setattr(MemorySource, "stop", asleep)


@found_by("test_handles_of_a_closed_connection_say_so")
def a_closed_connection_works(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryConnection, "require_open", lambda self: None)


@found_by("test_a_connection_closed_under_a_pending_fetch")
def a_pending_fetch_outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    async def only_mark(self: MemoryConnection) -> None:
        self.closed = True

    patch.setattr(MemoryConnection, "close", only_mark)


@found_by("test_messages_of_one_key_come_in_the_order_published")
def the_last_comes_first(patch: pytest.MonkeyPatch) -> None:
    def first(self: Queue, stored: Stored, due: float | None = None) -> None:
        self._fresh.appendleft(stored)
        self.wake()

    patch.setattr(Queue, "put", first)


@found_by("test_fetch_never_brings_more_than_asked", "test_a_handler_gets_what_the_app_published")
def fetch_brings_two_more(patch: pytest.MonkeyPatch) -> None:
    async def more(self: MemorySource, limit: int, max_bytes: int) -> Sequence[Delivery]:
        found = await fetch(self, limit, max_bytes)
        return [*found, *found, *found][: limit + 2]

    patch.setattr(MemorySource, "fetch", more)


@found_by("test_fetch_minds_the_bytes")
def fetch_ignores_the_bytes(patch: pytest.MonkeyPatch) -> None:
    async def all_of_it(self: MemorySource, limit: int, max_bytes: int) -> Sequence[Delivery]:
        return await fetch(self, limit, 2**60)

    patch.setattr(MemorySource, "fetch", all_of_it)


@found_by("test_what_was_published_before_the_first_group", "test_a_dead_letter_that_nobody_subscribes_to_is_kept")
def nothing_is_kept_for_the_first_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "queues", lambda self, name: self.topics.setdefault(name, {}))


@found_by("test_every_group_gets_every_message", "test_every_group_handles_every_message")
def groups_share_one_queue(patch: pytest.MonkeyPatch) -> None:
    register = Store.register
    patch.setattr(Store, "register", lambda self, name, group: register(self, name, "all"))


@found_by("test_headers_survive_byte_for_byte_or_are_refused")
def header_names_are_lowered(patch: pytest.MonkeyPatch) -> None:
    def lowered(self: Store, message: Outgoing, size: int, stamp: float) -> None:
        pairs = tuple((name.lower(), value) for name, value in message.headers.pairs)
        add(self, msgspec.structs.replace(message, headers=Headers.of(pairs)), size, stamp)

    patch.setattr(Store, "add", lowered)


@found_by("test_keys_survive_or_are_refused")
def an_empty_key_is_none(patch: pytest.MonkeyPatch) -> None:
    def emptied(self: Store, message: Outgoing, size: int, stamp: float) -> None:
        add(self, msgspec.structs.replace(message, key=message.key or None), size, stamp)

    patch.setattr(Store, "add", emptied)


@found_by("test_bodies_survive_byte_for_byte")
def bodies_are_stripped(patch: pytest.MonkeyPatch) -> None:
    def stripped(self: Store, message: Outgoing, size: int, stamp: float) -> None:
        add(self, msgspec.structs.replace(message, body=message.body.strip(b"\x00")), size, stamp)

    patch.setattr(Store, "add", stripped)


@found_by("test_one_bad_message_fails_alone", "test_one_bad_message_among_concurrent_publishes_fails_alone")
def one_bad_message_fails_the_call(patch: pytest.MonkeyPatch) -> None:
    async def together(self: MemoryConnection, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        if any(map(self._refuse, messages)):
            return [Rejected("one of them is bad", name=m.name, message_id=m.message_id) for m in messages]
        return await publish(self, messages)

    patch.setattr(MemoryConnection, "publish", together)


@found_by("test_a_body_over_the_limit", "test_one_bad_message_fails_alone")
def too_large_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryConnection, "_refuse", lambda self, message: None)


@found_by("test_priorities_where_there_are_any")
def priorities_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def plain(self: Queue, stored: Stored, due: float | None = None) -> None:
        stored.priority = 0
        put(self, stored, due)

    patch.setattr(Queue, "put", plain)


@found_by("test_a_dead_letter_tells_its_origin", "test_attempts_end_in_the_dead_letter")
def a_dead_letter_loses_its_headers(patch: pytest.MonkeyPatch) -> None:
    def bare(self: Store, stored: Stored, attempt: int, queue: Queue, name: str, outcome: DeadLetter) -> None:
        stored.headers = Headers()
        bury(self, stored, attempt, queue, name, outcome)

    patch.setattr(Store, "bury", bare)


@found_by("test_attempts_in_an_order_end_in_the_dead_letter")
def a_dead_letter_forgets_attempts_in_place(patch: pytest.MonkeyPatch) -> None:
    def first(self: Store, stored: Stored, attempt: int, queue: Queue, name: str, outcome: DeadLetter) -> None:
        bury(self, stored, 1, queue, name, outcome)

    patch.setattr(Store, "bury", first)


@found_by("test_one_message_id_twice_is_two_messages")
def an_id_is_taken_once(patch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def once(self: Store, message: Outgoing, size: int, stamp: float) -> None:
        if message.message_id not in seen:
            seen.add(message.message_id)
            add(self, message, size, stamp)

    patch.setattr(Store, "add", once)


@found_by("test_close_includes_stop")
def close_does_not_wake(patch: pytest.MonkeyPatch) -> None:
    async def asleep(self: MemorySource) -> None:
        self._closed = self._stopped = True

    patch.setattr(MemorySource, "close", asleep)


@found_by("test_a_connection_closes_the_sources_it_opened")
def a_connection_forgets_its_sources(patch: pytest.MonkeyPatch) -> None:
    async def only_mark(self: MemoryConnection) -> None:
        self.closed = True

    patch.setattr(MemoryConnection, "close", only_mark)


@found_by("test_dead_letters_are_listed_requeued_and_purged")
def requeue_goes_to_every_group(patch: pytest.MonkeyPatch) -> None:
    def publish_again(self: Store, letter: Stored) -> bool:
        name = letter.headers["streamfw-origin"]
        message = Outgoing(name=name, body=letter.body, message_id=letter.message_id, key=letter.key)
        add(self, message, letter.size, letter.timestamp)
        return True

    patch.setattr(Store, "unbury", publish_again)


@found_by("test_no_password_in_descriptions_and_errors")
def the_url_is_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Broker, "describe", lambda self: self.url)


@found_by("test_no_password_in_descriptions_and_errors")
def a_cause_shows_the_url(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: MemoryBroker) -> None:
        raise BrokerClosed("refused") from OSError(self.url)

    patch.setattr(memory.MemoryBroker, "connect", refuse)


@found_by("test_capabilities_are_whole", "test_what_is_not_declared_is_refused_at_build")
def any_source_object_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryBroker, "mistakes", lambda self, subscription: ())


class Suite(BrokerConformance):
    """In a hurry: what does not come at once will not come."""

    patience = 0.6
    quiet = 0.1
    grace = 0.2


@pytest.mark.parametrize(("fault", "test"), FAULTS, ids=[f"{fault.__name__}-{test}" for fault, test in FAULTS])
async def test_a_fault_is_found(fault: Fault, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    broker = MemoryBroker(max_body=1000_000)
    function = getattr(Suite(), test)
    given = {
        "broker": broker,
        "name": "conformance.fault",
        "capabilities": broker.capabilities_of(Subscription("conformance.fault")),
        "outcome": ACK,
        "body": b"\x00",
    }
    wanted = inspect.signature(function).parameters
    # Whatever it raises is a failed test; that it passes is what must not be.
    with pytest.raises((Exception, pytest.fail.Exception)):
        await function(**{name: given[name] for name in wanted})


STRANGER = """
import pytest_asyncio
from streamfw.memory import MemoryBroker
from streamfw.testing.conformance import BrokerConformance

class TestMine(BrokerConformance):
    quiet = 0.05

    @pytest_asyncio.fixture
    async def broker(self):
        return MemoryBroker(max_body=1000_000)

class TestUnfinished(BrokerConformance):
    pass

class TestBroken(BrokerConformance):
    quiet = 0.05

    @pytest_asyncio.fixture
    async def broker(self):
        class Broken(MemoryBroker):
            def mistakes(self, subscription):
                return ["nothing is right"]
        return Broken()
"""


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_stranger_runs_it(tmp_path: Path, mode: str) -> None:
    """In a project of its own, whatever its mode of pytest-asyncio; and failures explain themselves."""
    (tmp_path / "test_stranger.py").write_text(STRANGER)
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"asyncio_mode={mode}", "-p", "no:cacheprovider", "-k"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "STREAMFW"))}
    run = partial(
        subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    sound = run([*command, "Mine and (health or whole or drain or settling)"])
    assert sound.returncode == 0, sound.stdout
    assert "skipped" not in sound.stdout
    collected = run([*command, "health", "--collect-only"]).stdout
    assert "BrokerConformance" not in collected, "only the stranger's own classes are"
    unfinished = run([*command, "Unfinished and health"])
    assert "needs a fixture `broker`" in unfinished.stdout
    broken = run([*command, "Broken and whole"])
    assert "a plain name is right on every broker" in broken.stdout
    assert "['nothing is right'] == []" in broken.stdout, "assertions of the suite explain themselves"


def test_no_test_hides_another_of_its_name() -> None:
    names = Counter(n for base in BrokerConformance.__mro__ for n in vars(base) if n.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_in_the_suite_is_skipped() -> None:
    source = inspect.getsource(BrokerConformance)
    for base in BrokerConformance.__mro__[:-1]:
        source += inspect.getsource(base)
    assert "skip" not in source
    assert "xfail" not in source
