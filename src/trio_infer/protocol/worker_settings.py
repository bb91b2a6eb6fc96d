"""How the worker processes of a model are run: the server's own `parameters` of a configuration that say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

__all__ = ["WORKER_PARAMETERS", "WorkerSettings", "fault_of_worker", "read_cpus"]

GRACE: Final = 0.25
"""Seconds from a request's cancel until its process is killed, if the configuration doesn't say: long enough for one
operator of a large model (15 to 100 ms were measured), short beside what a departed client's work would take."""

WORKER_PARAMETERS: Final = {
    "cancel_grace_ms": ("[0-9]{1,9}|none", "a whole number of milliseconds, or 'none'"),
    "spares": ("[0-9]{1,2}", "a whole number from 0 to 99"),
    "max_requests": ("[1-9][0-9]{0,8}", "a whole number of requests, 1 or more"),
    "memory_limit_mb": ("[1-9][0-9]{0,7}", "a whole number of MiB, 1 or more"),
    "cpu_affinity": (
        r"(?:[0-9]{1,4}(?:-[0-9]{1,4})?)(?:[,;][0-9]{1,4}(?:-[0-9]{1,4})?)*",
        "numbers of CPUs such as '0-3,8', for each instance in turn if parted by ';'",
    ),
}
"""What they may be, as a pattern and in words."""

_ENVIRONMENT: Final = "env."


def read_cpus(text: str) -> tuple[frozenset[int], ...]:
    """The sets of CPUs that `cpu_affinity` names, `"0-3,8;4-7"`.

    Raises:
        ValueError: a range that ends before it begins.
    """
    sets = []
    for part in text.split(";"):
        cpus: set[int] = set()
        for item in part.split(","):
            first, _, last = item.partition("-")
            if int(last or first) < int(first):
                raise ValueError(f"`cpu_affinity` has the range {item}, which ends before it begins")
            cpus.update(range(int(first), int(last or first) + 1))
        sets.append(frozenset(cpus))
    return tuple(sets)


def fault_of_worker(parameters: Mapping[str, str], *, stateful: bool) -> tuple[str, str] | None:
    """What is wrong with how worker processes are to be run, and a pattern that finds it in the configuration's text.

    Args:
        parameters: each matches its pattern.
        stateful: as `WorkerSettings.of_parameters` has it.
    """
    for key, value in parameters.items():
        if key.startswith(_ENVIRONMENT):
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key.removeprefix(_ENVIRONMENT)):
                reason = f"parameter `{key}` must be `{_ENVIRONMENT}` and the name of an environment variable"
                return reason, re.escape(key)
            if "\0" in value:
                return f"parameter `{key}` has a zero byte in its value", re.escape(key)
    try:
        read_cpus(parameters.get("cpu_affinity", "0"))
    except ValueError as error:
        return str(error), r"\bcpu_affinity\b"
    if stateful and "max_requests" in parameters:
        reason = "`max_requests` ends a process with all that it knows, which `sequence_batching` needs; leave one out"
        return reason, r"\bmax_requests\b"
    return None


@attrs.frozen
class WorkerSettings:
    """How a model's worker processes are run.

    Args:
        grace: seconds that a cancelled request may go on before its process is killed; None for any time.
        spares: processes that are kept ready beside those that are in use, for each kind of instance.
        max_requests: that a process takes before another takes its place; 0 for any number.
        memory_limit: bytes of private, writable memory that a process may have; 0 for any number.
        cpus: sets of CPUs that instances run on, taken in turns; none for all that the server may use.
        environment: variables that processes have besides the server's own.
    """

    grace: float | None = GRACE
    spares: int = 1
    max_requests: int = 0
    memory_limit: int = 0
    cpus: tuple[frozenset[int], ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, str], *, stateful: bool) -> WorkerSettings:
        """As a configuration has them, which were checked.

        Args:
            stateful: whether the model keeps something of one request for the next, which a kill would lose for other
                clients; then nothing is killed unless it is asked for.
        """
        milliseconds = parameters.get("cancel_grace_ms", "none" if stateful else "")
        grace = None if milliseconds == "none" else int(milliseconds) / 1000 if milliseconds else GRACE
        return cls(
            grace=grace,
            spares=int(parameters.get("spares", 0 if grace is None else 1)),
            max_requests=int(parameters.get("max_requests", 0)),
            memory_limit=int(parameters.get("memory_limit_mb", 0)) * 2**20,
            cpus=read_cpus(parameters["cpu_affinity"]) if "cpu_affinity" in parameters else (),
            environment={
                key.removeprefix(_ENVIRONMENT): value
                for key, value in parameters.items()
                if key.startswith(_ENVIRONMENT)
            },
        )
