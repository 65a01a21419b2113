"""The runtime: one pump for each subscriber.

    fetch(free capacity) -> lanes -> handler -> settlement buffer -> settle(many)

`pump` ties the parts together; `crew` holds the workers, `lanes` the order, `settler` and `fetcher` the two round
trips, `prefetch` how much is fetched.
"""
