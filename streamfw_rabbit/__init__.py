"""RabbitMQ as a streamfw broker: the package's place.

It registers no URL scheme until its broker is complete, so ``amqp://`` in a configuration is refused at build with the
schemes that are installed, rather than half served."""
