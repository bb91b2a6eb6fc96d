"""Every error that is somebody's fault, by whose fault it is.

- `InferError` and its subclasses: one request went wrong. Its message is the answer's `{"error": ...}`; its code
  picks the HTTP status. Codecs raise it for what a client sent; a model may raise it to choose the code of its own
  failure.
- `SetupError` and its subclasses: what the operator asked for can't be done (a port in use, a broken `config.pbtxt`).
  The command prints its message as one line and exits with 1.

Anything else that is raised is a bug, in a model or in the server: the client gets a 500, the log gets the traceback,
once.
"""

from __future__ import annotations

import enum
from pathlib import Path

__all__ = [
    "BadJSONError",
    "ErrorCode",
    "InferError",
    "ModelLoadError",
    "Rescheduled",
    "RunCancelled",
    "SetupError",
    "UnknownModelError",
]


class ErrorCode(enum.Enum):
    """Triton's error codes; the value is Triton's number, `status` the HTTP status of its front end."""

    status: int

    def __new__(cls, number: int, status: int) -> ErrorCode:
        self = object.__new__(cls)
        self._value_ = number
        self.status = status
        return self

    # Numbers as in TRITONSERVER_Error_Code; statuses as measured on Triton's HTTP front end.
    UNKNOWN = 0, 400
    INTERNAL = 1, 500
    NOT_FOUND = 2, 404
    INVALID_ARG = 3, 400
    UNAVAILABLE = 4, 503
    UNSUPPORTED = 5, 501
    ALREADY_EXISTS = 6, 400
    CANCELLED = 7, 400


class InferError(Exception):
    """One request failed; the client is told `message`.

    Args:
        message: what was wrong, where, expected and got, and what to do; it becomes the answer's `error`.
        code: picks the HTTP status; INVALID_ARG (400) unless said otherwise.
        status: an HTTP status that no code stands for (405, 408, 413, ...); overrides the code's.
        retry_after: seconds after which asking again may help; the answer's `Retry-After`. None if nobody knows.
    """

    def __init__(
        self,
        message: str,
        code: ErrorCode = ErrorCode.INVALID_ARG,
        *,
        status: int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after: int | None = retry_after
        self.code = code
        self.status: int = code.status if status is None else status


class Rescheduled(InferError):
    """A model wants the request again: an iterative sequence goes on with it. For any other model it is an error."""

    def __init__(self) -> None:
        super().__init__(
            "the model reschedules its request, which needs `sequence_batching { iterative_sequence: true }` in its "
            "configuration",
            ErrorCode.INTERNAL,
        )


class RunCancelled(BaseException):
    """A model's code asked whether anybody still wants its result, and nobody does.

    Raised by `check_cancelled` and by what stops a backend's computation; it ends the run, and goes no further. Not an
    `Exception`, as trio's `Cancelled` is none: code that handles failures is not to take it for one.
    """


class BadJSONError(InferError):
    """The request's JSON can't be read, lacks a field, or has a value of the wrong JSON type.

    Triton answers 500 to these (its JSON reader reports INTERNAL, and its tests assert it); a server option turns
    that into 400 for operators whose alarms count 5xx.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.INTERNAL)


class SetupError(Exception):
    """What the operator asked for can't be done; the message is one line that says what and where."""


class ModelLoadError(SetupError):
    """A model can't be served.

    Args:
        model: the model's name.
        reason: what was wrong.
        where: the file, and the line in it where that is known.

    Attributes:
        text: the reason and the place, without the model's name.
        version: which of its versions; "" if that can't be told.
    """

    def __init__(self, model: str, reason: str, *, where: Path | None = None, line: int | None = None) -> None:
        place = "" if where is None else f" ({where}{'' if line is None else f':{line}'})"
        super().__init__(f"model '{model}' can't be loaded: {reason}{place}")
        self.text: str = f"{reason}{place}"
        self.model = model
        self.reason = reason
        self.where = where
        self.line = line
        self.version: str = ""


class UnknownModelError(ModelLoadError):
    """No repository has a model of that name."""
