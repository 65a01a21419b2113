"""A service for GitHub's webhooks, and the demo that puts it under load: ``python -m examples.webhooks``."""
