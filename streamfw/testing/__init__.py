"""For tests: the conformance suite for brokers, and brokers to test programs on.

- `streamfw.testing.conformance`: what every broker must hold, as tests to run on one's own.
- `streamfw.testing.synthetic`: two brokers in process that fail on demand.
"""
