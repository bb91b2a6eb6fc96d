"""The machine's CPU and memory, as /proc tells them: two small reads, not worth a thread. Nothing if there is no /proc.

Utilization is a share between two looks. Looks closer together than the interval see the same, so that two scrapers
don't spoil each other's numbers, and no task has to poll.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["Machine"]


class Machine:
    """Looks at `/proc`.

    Args:
        interval: seconds for which a look holds.
        proc: where to look.
    """

    def __init__(self, interval: float = 2.0, proc: Path = Path("/proc")) -> None:
        self._interval = interval
        self._proc = proc
        self._looked = time.monotonic()
        self._seen = self._cpu()
        self._utilization = 0.0

    def look(self) -> dict[str, float]:
        """Values by the names of their metrics; empty if this machine doesn't tell."""
        now = time.monotonic()
        if now - self._looked >= self._interval:
            seen = self._cpu()
            busy, total = seen[0] - self._seen[0], seen[1] - self._seen[1]
            self._looked, self._seen = now, seen
            self._utilization = busy / total if total > 0 else 0.0
        memory = self._memory()
        return {} if not memory else {"nv_cpu_utilization": self._utilization, **memory}

    def _cpu(self) -> tuple[int, int]:
        """Ticks that were busy, and all of them, since the machine started."""
        try:
            first = (self._proc / "stat").read_text(encoding="ascii").partition("\n")[0].split()
            user, nice, system, idle, waiting, *rest = map(int, first[1:9])
        except (OSError, ValueError):
            return 0, 0
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + waiting

    def _memory(self) -> dict[str, float]:
        try:
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
            kilobytes = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines)}
            total, available = kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
        except (OSError, ValueError, KeyError, IndexError):
            return {}
        return {"nv_cpu_memory_total_bytes": total, "nv_cpu_memory_used_bytes": total - available}
