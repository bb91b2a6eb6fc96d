"""Trace settings, on three levels: what the server was started with, what was set for all models, what for one.

Each setting of a model is its own if it was set, else that of all models, else the one from the start. `null` takes a
setting back, on the level that is asked. Numbers are strings on the wire, as Triton writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from trio_infer.errors import ErrorCode, InferError, SetupError

__all__ = ["DEFAULTS", "TraceOptions", "TraceSettings", "read_trace_options"]

LEVELS: Final = ("TIMESTAMPS", "TENSORS")

_OLDER: Final = {"MIN": "TIMESTAMPS", "MAX": "TIMESTAMPS"}

_LIMITS: Final = {
    "trace_rate": (0, 2**32 - 1),
    "trace_count": (-1, 2**31 - 1),
    "log_frequency": (0, 2**32 - 1),
}

DEFAULTS: Final[dict[str, Any]] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Triton's, in its order."""


class TraceSettings:
    """What is traced, how often, and where it goes.

    Args:
        start: settings that differ from `DEFAULTS`, checked already.
    """

    def __init__(self, start: Mapping[str, Any] | None = None) -> None:
        self._start = {**DEFAULTS, **(start or {})}
        self._common: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._seen: Counter[str] = Counter()
        self.on: bool = self._any_on()
        """Whether any request may be traced."""

    def of(self, model: str = "") -> dict[str, Any]:
        """The settings that hold for a model; for all that have none of their own, if it is ""."""
        return {**self._start, **self._common, **self._models.get(model, {})}

    def update(self, changes: Mapping[str, Any], model: str = "") -> None:
        """Change settings for one model or, if it is "", for all; all of them or none.

        Args:
            changes: values as JSON has them; None takes a setting back.

        Raises:
            InferError: one of them is none, or can't be changed.
        """
        checked = {name: None if value is None else _check(name, value) for name, value in changes.items()}
        self._seen.pop(model, None)
        own = self._models.setdefault(model, {}) if model else self._common
        for name, value in checked.items():
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value
        if model and not own:
            del self._models[model]
        self.on = self._any_on()

    def _any_on(self) -> bool:
        levels = (self._start, self._common, *self._models.values())
        return bool(self._start["trace_file"]) and any("TIMESTAMPS" in each.get("trace_level", ()) for each in levels)

    def take(self, model: str) -> dict[str, Any] | None:
        """A request for a model has ended: the settings if it is to be traced, which counts it; else None.

        Requests are counted together for all models that have no settings of their own.
        """
        settings = self.of(model)
        if not self.on or "TIMESTAMPS" not in settings["trace_level"]:
            return None
        scope = model if model in self._models else ""
        self._seen[scope] += 1
        rate, count = int(settings["trace_rate"]), int(settings["trace_count"])
        if not rate or self._seen[scope] % rate or not count:
            return None
        if count > 0:  # what is shown is how many are left, as in Triton
            levels = (self._models.get(model, {}), self._common, self._start)
            next(level for level in levels if "trace_count" in level)["trace_count"] = str(count - 1)
        return settings


def _check(name: str, value: Any) -> Any:
    if name == "trace_level":
        return _level(value)
    if name in _LIMITS:
        return _number(name, value)
    if name == "trace_file":
        raise InferError("trace file location can not be updated through network protocol", ErrorCode.UNSUPPORTED)
    known = ", ".join(("trace_level", *_LIMITS))
    raise InferError(f"unknown trace setting '{name[:80]}', expected one of {known}")


def _level(value: Any) -> list[str]:
    levels = [value] if isinstance(value, str) else value
    if not isinstance(levels, list) or not levels or not all(isinstance(level, str) for level in levels):
        raise InferError("Unable to parse 'trace_level', expecting a string or an array of strings")
    if "OFF" in levels:
        if len(levels) > 1:
            raise InferError("Expect only one trace level 'OFF' is specified")
        return ["OFF"]
    levels = [_OLDER.get(level, level) for level in levels]
    for level in levels:
        if level not in LEVELS:
            raise InferError(
                f"Unable to parse 'trace_level', expecting OFF or {' or '.join(LEVELS)}, got: {level[:80]}"
            )
    return [level for level in LEVELS if level in levels]


def _number(name: str, value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:  # "strings or arrays of strings", as Triton's clients send them
        (value,) = value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    low, high = _LIMITS[name]
    text = value.strip() if isinstance(value, str) else ""
    digits = text.removeprefix("-").removeprefix("+")
    if not (digits.isascii() and digits.isdecimal()) or len(text) - len(digits) > 1:
        raise InferError(f"Unable to parse '{name}', got: {str(value)[:80]}")
    number = int(text) if len(digits) <= 20 else high + 1
    if name == "trace_count" and number < low:
        raise InferError(f"Unable to parse 'trace_count'. Expecting value >= {low}, got:{text[:80]}")
    if not low <= number <= high:
        raise InferError(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text[:80]}")
    return str(number)


_OPTIONS: Final = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "file": "trace_file",
    "log-frequency": "log_frequency",
    "mode": "trace_mode",
}


def read_trace_options(words: Iterable[str], *, flag: str = "--trace-config") -> dict[str, Any]:
    """The settings in the values of `--trace-config`: `rate=100`, `triton,file=/tmp/trace.json`.

    A level may be given several times.

    Raises:
        SetupError: one of them is none.
    """
    settings: dict[str, Any] = {}
    levels: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        mode, comma, inner = key.partition(",")
        if comma and mode != "triton":
            raise SetupError(f"{flag}: trace mode '{mode}' is not supported, only 'triton' is; got '{word}'")
        name = _OPTIONS.get(inner if comma else key)
        if not equals or name is None:
            raise SetupError(f"{flag} must be one of {', '.join(_OPTIONS)}, with = and a value; got '{word}'")
        try:
            if name == "trace_level":
                levels += value.split(",")
                settings[name] = _level(list(dict.fromkeys(levels)))
            elif name == "trace_mode":
                if value != "triton":
                    raise InferError(f"trace mode '{value}' is not supported, only 'triton' is")
            elif name == "trace_file":
                settings[name] = value
            else:
                settings[name] = _number(name, value)
        except InferError as error:
            raise SetupError(f"{flag}: {error.message}") from None
    return settings


@attrs.frozen(kw_only=True)
class TraceOptions:
    """Trace settings as the command is told of them.

    Attributes:
        trace_config: SETTING=VALUE, may be given several times: level (OFF, TIMESTAMPS, TENSORS), rate, count, mode
            (triton), and triton,file and triton,log-frequency.
        trace_level: level, in Triton's older spelling.
        trace_rate: rate: one of so many requests is traced. (Triton: 1000.)
        trace_count: count: so many are traced at most; -1 for any number. (Triton: -1.)
        trace_file: file that traces are written to.
        log_frequency: log-frequency: so many traces go to a file before the next is begun; 0 for one file. (Triton: 0.)
    """

    trace_config: tuple[str, ...] = ()
    trace_level: tuple[str, ...] = ()
    trace_rate: str | None = None
    trace_count: str | None = None
    trace_file: str | None = None
    log_frequency: str | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that differ from the defaults. `trace_config` wins over older spellings.

        Raises:
            SetupError: one of them is none.
        """
        settings: dict[str, Any] = {}
        for name, key in (
            ("trace_level", "level"),
            ("trace_rate", "rate"),
            ("trace_count", "count"),
            ("trace_file", "file"),
            ("log_frequency", "log-frequency"),
        ):
            value = getattr(self, name)
            words = [value] if isinstance(value, str) else value or ()
            flag = f"--{name.replace('_', '-')}"
            settings |= read_trace_options([f"{key}={word}" for word in words], flag=flag)
        return settings | read_trace_options(self.trace_config)
