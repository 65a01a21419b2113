"""The fault suites: processes killed and transports cut while messages flow, and an oracle over sets of ids.

`make test` runs a seeded slice of each (the `test_*.py` here); `make soak` (`soak.py`) runs the full counts, resumes
where it was stopped, and writes ``docs/reliability/results.json``.
"""
