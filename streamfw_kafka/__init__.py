"""Kafka as a streamfw broker: the package's place.

It registers no URL scheme until its broker is complete, so ``kafka://`` in a configuration is refused at build with the
schemes that are installed, rather than half served."""
