"""What is wrong with the options of a declaration, whatever the broker: names, types, values that make no sense."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .codec import Codec
from .config import near
from .outcome import Backoff, Outcome
from .subscriber import Batch, Declaration, Options

__all__ = ["codec_mistake", "middleware_mistakes", "option_mistakes"]

TEXTS = {"broker": False, "group": True, "dead_letter": True, "publishes": True}
"""Options that are text, and whether they may be None."""
WHOLE = ("workers", "attempts", "prefetch", "held", "max_bytes")
FLAGS = ("transactional", "task_per_message")


def option_mistakes(d: Declaration) -> list[tuple[str, str]]:
    """Pairs of an option and what is wrong with it."""
    return [*_names(d), *_texts(d), *_numbers(d), *_kinds(d), *_together(d)]


def _names(d: Declaration) -> Iterator[tuple[str, str]]:
    for name in d.unknown:
        yield name, f"there is no such option{near(name, Options.__annotations__)}"
    if not d.name:
        yield "source", f"{d.source!r} is neither a name nor a source object with a name"


def _texts(d: Declaration) -> Iterator[tuple[str, str]]:
    for option, optional in TEXTS.items():
        value: object = getattr(d, option)
        if value is None and optional:
            continue
        if not isinstance(value, str):
            yield option, f"{value!r} is not text"
        elif not value:
            yield option, "is an empty name"


def _numbers(d: Declaration) -> Iterator[tuple[str, str]]:
    for option in WHOLE:
        value: object = getattr(d, option)
        if value is None and option in ("attempts", "prefetch"):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            yield option, f"{value!r} is not a whole number"
        elif value < 1:
            yield option, f"{value} is below 1"
    for option in FLAGS:
        if not isinstance(getattr(d, option), bool):
            yield option, f"{getattr(d, option)!r} is neither True nor False"
    durations: object = d.durations
    if durations is not None and not isinstance(durations, bool):
        yield "durations", f"{durations!r} is neither True nor False"
    if d.timeout is not None and not _is_seconds(d.timeout):
        yield "timeout", f"{d.timeout!r} is not a number of seconds above zero"


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _kinds(d: Declaration) -> Iterator[tuple[str, str]]:
    ordered_by: object = d.ordered_by
    if ordered_by is not None and ordered_by not in ("key", "partition"):
        yield "ordered_by", f'{ordered_by!r} is neither "key" nor "partition"'
    backoff: object = d.backoff
    if not isinstance(backoff, Backoff):
        yield "backoff", f"{backoff!r} is not a Backoff(first=.., factor=.., max=..), in seconds"
    batch: object = d.batch
    if batch is not None and not (isinstance(batch, Batch) and isinstance(batch.size, int)):
        yield "batch", f"{batch!r} is not a Batch(size, wait)"
    if d.codec is not None and (mistake := codec_mistake(d.codec)) is not None:
        yield "codec", mistake
    for mistake in middleware_mistakes(d.middleware):
        yield "middleware", mistake
    run_in: object = d.run_in
    if run_in is not None and run_in not in ("thread", "process"):
        yield "run_in", f'{run_in!r} is neither "thread" nor "process"'
    patterns: object = d.replies_to
    if patterns is not None and (
        not isinstance(patterns, Sequence) or isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns)
    ):
        yield "replies_to", f"{patterns!r} is not a list of patterns"
    for mistake in _rule_mistakes(d.on_error):
        yield "on_error", mistake


def _together(d: Declaration) -> Iterator[tuple[str, str]]:
    if d.batch is not None and d.publishes is not None:
        yield "publishes", "a batch handler returns outcomes, so there is no value to publish"
    if isinstance(d.batch, Batch) and isinstance(d.prefetch, int) and d.prefetch < d.batch.size:
        yield "prefetch", f"{d.prefetch} never fills a batch of {d.batch.size}"
    if d.dead_letter is not None and d.dead_letter == d.name:
        yield "dead_letter", f"{d.name!r} is what it subscribes to: dead letters would come back for ever"


def _rule_mistakes(rules: object) -> Iterator[str]:
    if not isinstance(rules, Mapping):
        yield f"{rules!r} is not a mapping of exceptions to outcomes"
        return
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            yield f"{kind!r} is not a type of exception"
        if isinstance(rule, type) and not issubclass(rule, Outcome):
            yield f"{rule!r} is no outcome (Ack, Retry, Drop, DeadLetter)"
        elif not (callable(rule) or isinstance(rule, Outcome)):
            yield f"{rule!r} is neither an outcome nor a function that gives one"


def codec_mistake(codec: object) -> str | None:
    """Why `codec` cannot be one."""
    if isinstance(codec, type):
        return f"{codec.__name__} is a class; give an instance, {codec.__name__}()"
    return None if isinstance(codec, Codec) else f"{codec!r} is not a Codec"


def middleware_mistakes(middleware: object) -> Iterable[str]:
    """What in `middleware` cannot be one."""
    if not isinstance(middleware, Sequence) or isinstance(middleware, str):
        yield f"{middleware!r} is not a list of middleware"
        return
    for layer in middleware:
        if not callable(layer):
            yield f"{layer!r} is not a function"
        elif not _takes_two(layer):
            yield f"{getattr(layer, '__qualname__', layer)} does not take (message, call_next)"


def _takes_two(layer: Any) -> bool:
    try:
        inspect.signature(layer).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return True
    return True
