"""``python -m benchmarks [SCENARIO..]``: measure; ``python -m benchmarks render``: write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys

from .document import new_run, publish, write
from .harness import measure
from .render import PAGE, page, table
from .scenarios import NAMES, scenario

GROUPS = {"service": ("dispatch", "postgres"), "all": NAMES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    choices = (*NAMES, *GROUPS, "render")
    parser.add_argument("what", nargs="*", default=["all"], metavar="WHAT", help=", ".join(choices))
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop")
    parser.add_argument("--rounds", type=int, help="rounds (default: at least 9)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--publish", action="store_true", help="put the runs into docs/benchmarks.json, and render it")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.what if name not in choices]:
        parser.error(f"no scenario {unknown[0]!r}: {', '.join(choices)}")
    names = dict.fromkeys(one for name in arguments.what for one in GROUPS.get(name, (name,)) if name != "render")
    missed = 0
    for name in names:
        one = scenario(name, arguments.loop)
        cases = measure(
            one, rounds=arguments.rounds, only=arguments.only, report=lambda line: print(line, file=sys.stderr)
        )
        run = new_run(one, cases, arguments.loop)
        print(table(run))
        print(f"written to {write(run)}\n")
        if arguments.publish:
            publish(run)
        missed += sum(comparison.met is False for case in run.cases for comparison in case.comparisons)
    if arguments.publish or "render" in arguments.what:
        PAGE.write_text(page())
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
