"""Two brokers in process that are as different from each other as brokers get.

They prove the contract, together with the real ones, and they are examples to start from: each is whole, small, and
passes the conformance suite.

- `PositionalBroker`: a log. Partitions move between the sources of a group, settlement is a position, and nothing can
  be given back singly. Read it for `Watermark`, epochs, and how a source holds its pump.
- `PushBroker`: channels. Messages come before they are asked for, tags mean something on one channel only, and a cut
  ends all of them. Read it for buffers, multiple acknowledgements, and what becomes of deliveries from before a cut.

Both are faulty on demand (`revoke`, `cut`, `outage`), so programs can be tested on what a broker does to them.
"""

from __future__ import annotations

from ._positional import PositionalBroker
from ._push import PushBroker

__all__ = ["PositionalBroker", "PushBroker"]
