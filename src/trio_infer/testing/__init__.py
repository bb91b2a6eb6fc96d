"""Helpers for the tests of programs that embed the server, of runners, and for our own."""

from trio_infer.testing.contract import Check, Conduct, Report, check_runner
from trio_infer.testing.memory import MemoryListener

__all__ = ["Check", "Conduct", "MemoryListener", "Report", "check_runner"]
