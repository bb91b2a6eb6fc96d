"""Helpers for the tests of programs that embed the server, and for our own."""

from trio_infer.testing.memory import MemoryListener

__all__ = ["MemoryListener"]
