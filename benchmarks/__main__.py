"""``python -m benchmarks [SCENARIO..]``: measure; ``python -m benchmarks render``: write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys

from .counts import JOBS, count_calls, store_baseline
from .document import new_run, publish, write
from .harness import Scenario, measure
from .render import PAGE, page, table
from .scenarios import LOOPS, NAMES, scenario

GROUPS = {"service": ("dispatch", "postgres", "kafka", "rabbit"), "all": NAMES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    choices = (*NAMES, *GROUPS, "render")
    parser.add_argument("what", nargs="*", default=["all"], metavar="WHAT", help=", ".join(choices))
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), help="event loop (default: as the scenario says)")
    parser.add_argument("--rounds", type=int, help="rounds (default: at least 9)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--publish", action="store_true", help="put the runs into docs/benchmarks.json, and render it")
    parser.add_argument("--baseline", action="store_true", help="count, and store the counts for the tests to compare")
    arguments = parser.parse_args()
    if arguments.baseline:
        store_baseline({name: count_calls(job) for name, job in JOBS.items()})
        return 0
    if unknown := [name for name in arguments.what if name not in choices]:
        parser.error(f"no scenario {unknown[0]!r}: {', '.join(choices)}")
    names = dict.fromkeys(one for name in arguments.what for one in GROUPS.get(name, (name,)) if name != "render")
    missed = 0
    for name in names:
        loop = arguments.loop or LOOPS[name]
        one = scenario(name, loop)
        run = new_run(one, loop)
        if isinstance(one, Scenario):
            run.cases = measure(one, rounds=arguments.rounds, only=arguments.only, report=_say)
            run.unit, run.facts = one.unit, dict(one.facts)
        else:
            run.counts = one.count(_say)
        print(table(run))
        print(f"written to {write(run)}\n")
        if arguments.publish:
            publish(run)
        missed += sum(comparison.met is False for case in run.cases for comparison in case.comparisons)
    if arguments.publish or "render" in arguments.what:
        PAGE.write_text(page())
    return 1 if missed else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
