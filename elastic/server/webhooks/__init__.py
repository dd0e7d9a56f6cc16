"""Webhooks: what happens to runs is told to URLs that projects name, signed and repeated (Standard Webhooks)."""

from elastic.server.webhooks.sending import DeliveryLoop
from elastic.server.webhooks.signing import new_secret

__all__ = ["DeliveryLoop", "new_secret"]
