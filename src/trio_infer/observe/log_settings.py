"""What is logged, and how a line looks: Triton's settings, acting on Python's loggers, and changeable while it runs.

One handler, on the root logger, belongs to the command; models and libraries log into it, too. Triton turns each
severity on and off by itself, which Python's levels can't say, so the handler has a filter; the loggers' levels are the
lowest of what passes, so that what is off costs nothing. Verbose level 1 is DEBUG of the server and of models, 2 of
everything.

A line is one line, whatever the message: control characters in it are escaped as in JSON, so that no client can write
lines of its own into the log. A traceback follows its line as it is.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs

from trio_infer.errors import ErrorCode, InferError, SetupError

__all__ = ["FORMATS", "LineFormatter", "LogFormat", "LogSettings"]

LogFormat: TypeAlias = Literal["default", "ISO8601"]
FORMATS: Final[tuple[LogFormat, ...]] = ("default", "ISO8601")

OURS: Final = "trio_infer"

_LETTERS: Final = ((logging.ERROR, "E"), (logging.WARNING, "W"))


class LineFormatter(logging.Formatter):
    """A record as a line in Triton's form.

    "default" is `I1130 20:01:55.532575 341 model.py:68] "text"`, "ISO8601" is `2026-11-30T20:01:55Z I 341 model.py:68]
    "text"`: severity (what is verbose counts as I), time (UTC), process, and where in the source it was said.
    """

    def __init__(self, form: LogFormat = "default") -> None:
        super().__init__()
        self.form: LogFormat = form

    def format(self, record: logging.LogRecord) -> str:
        letter = next((letter for level, letter in _LETTERS if record.levelno >= level), "I")
        seconds, micros = divmod(round(record.created * 1e6), 1_000_000)
        when = time.gmtime(seconds)
        if self.form == "default":
            head = f"{letter}{time.strftime('%m%d %H:%M:%S', when)}.{micros:06d}"
        else:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', when)} {letter}"
        text = json.dumps(record.getMessage(), ensure_ascii=False)
        line = f"{head} {record.process} {record.filename}:{record.lineno}] {text}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


@attrs.define
class LogSettings:
    """The settings of `/v2/logging`; they act when `apply` is called.

    Attributes:
        log_file: where lines go; "" for stderr. Fixed.
        log_info, log_warning, log_error: whether each severity is logged.
        log_verbose_level: 0 for none of what is verbose.
        log_format: "default" or "ISO8601".
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: LogFormat = "default"
    _handler: logging.Handler | None = attrs.field(init=False, default=None, eq=False, repr=False)

    def install(self) -> None:
        """Make the process log as the settings say; call `uninstall` to undo that.

        A log file that is moved away (by logrotate, say) is made anew. As with `logging.basicConfig`, stderr is left to
        handlers that are there already.

        Raises:
            SetupError: the file can't be written.
        """
        if self.log_file:
            try:
                self._handler = logging.handlers.WatchedFileHandler(Path(self.log_file), encoding="utf-8")
            except OSError as error:
                raise SetupError(f"--log-file: can't write {self.log_file}: {error.strerror}") from error
        elif not logging.getLogger().handlers:
            self._handler = logging.StreamHandler(sys.stderr)
        if self._handler is not None:
            self._handler.addFilter(self._passes)
            logging.getLogger().addHandler(self._handler)
        self.apply()

    def uninstall(self) -> None:
        """Take the handler away again."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None

    def apply(self) -> None:
        """Let changed settings act."""
        severities = (
            (logging.DEBUG, self.log_verbose_level > 0),
            (logging.INFO, self.log_info),
            (logging.WARNING, self.log_warning),
            (logging.ERROR, self.log_error),
        )
        lowest = next((level for level, on in severities if on), logging.CRITICAL + 1)
        logging.getLogger(OURS).setLevel(lowest)
        everything = logging.DEBUG if self.log_verbose_level > 1 else max(lowest, logging.INFO)
        logging.getLogger().setLevel(everything)
        if self._handler is not None:
            self._handler.setFormatter(LineFormatter(self.log_format))

    def as_json(self) -> dict[str, Any]:
        """The settings, as Triton writes them."""
        return {
            "log_file": self.log_file,
            "log_info": self.log_info,
            "log_warning": self.log_warning,
            "log_error": self.log_error,
            "log_verbose_level": self.log_verbose_level,
            "log_format": self.log_format,
        }

    def update(self, **changes: Any) -> None:
        """Change some, all or none, and let them act.

        Args:
            changes: by name; of the types that the attributes have, and not `log_file`.

        Raises:
            InferError: the format is none (503, as Triton says).
        """
        form = changes.get("log_format", self.log_format)
        if form not in FORMATS:
            raise InferError(
                f"invalid argument for --log_format, got: {form} (expected {' or '.join(FORMATS)})",
                ErrorCode.UNAVAILABLE,
            )
        for name, value in changes.items():
            setattr(self, name, value)
        self.apply()

    def _passes(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return self.log_error
        if record.levelno >= logging.WARNING:
            return self.log_warning
        if record.levelno >= logging.INFO:
            return self.log_info
        return self.log_verbose_level > (0 if record.name.partition(".")[0] == OURS else 1)
