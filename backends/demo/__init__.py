"""The whole loop on a tiny model with real conversations, as one job."""

from backends.demo.run import demo

__all__ = ["demo"]
