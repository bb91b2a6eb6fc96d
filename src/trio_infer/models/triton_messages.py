"""Requests, responses and the sender, as model code handles them; the names and the calls are Triton's.

`is_cancelled` on requests and senders is not a method but the request's own callable, stored as an attribute: calling
it costs what the callable costs (0.05 microseconds for a life's flag), with no layer between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from trio_infer.errors import InferError
from trio_infer.models.triton_tensors import Tensor, TritonError, TritonModelException, unsupported
from trio_infer.models.triton_work import Work
from trio_infer.protocol.values import InferRequest, InferResponse

__all__ = ["InferenceRequest", "InferenceResponse", "InferenceResponseSender", "Outlet"]

FINAL: Final = 1
RESCHEDULE: Final = 2


class InferenceResponse:
    """What goes back to the client: tensors or an error.

    Args:
        output_tensors: by name; those that the client didn't ask for are left out.
        error: if given, the client gets it instead.
        parameters: str, int, float or bool by name.
    """

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] | None = None,
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = list(output_tensors or ())
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"output_tensors must hold pb_utils.Tensor, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error must be a pb_utils.TritonError, got {type(error).__name__}")
        self._error = error
        self._parameters = _checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON text."""
        return json.dumps(self._parameters)

    def parameter_values(self) -> dict[str, Any]:
        """The parameters as they were given; for the runner."""
        return self._parameters


class Outlet:
    """What a request and its senders hold of the work they belong to: when the last of them goes, it hears of it.

    Args:
        work: takes the responses.
        encode: makes what the server sends of a response, in the model's thread.
    """

    __slots__ = ("_encode", "_work", "promise")

    def __init__(self, work: Work, encode: Callable[[InferenceResponse], InferResponse | InferError]) -> None:
        self._work = work
        self._encode = encode
        self.promise: Callable[[], None] = work.promise

    def put(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Pass a response on; waits while too many are on their way.

        Raises:
            ValueError: it can't be sent; says why.
        """
        self._work.put(None if response is None else self._encode(response), final=final)

    def __del__(self) -> None:
        self._work.drop()


def _never() -> bool:
    return False


class InferenceResponseSender:
    """Sends a request's responses one by one, from any thread, also after `execute` has returned.

    Attributes:
        is_cancelled: call it to learn whether the client has left; cheap enough for each step of a loop.
    """

    __slots__ = ("_outlet", "is_cancelled")

    def __init__(self, outlet: Outlet, is_cancelled: Callable[[], bool]) -> None:
        self._outlet = outlet
        self.is_cancelled: Callable[[], bool] = is_cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send one response, or only the flag that no more will come.

        Waits while the client reads more slowly than the model sends. After the client has left it returns at once.

        Args:
            response: may be None together with the final flag.
            flags: `TRITONSERVER_RESPONSE_COMPLETE_FINAL` with the last call.

        Raises:
            TritonModelException: sent after the final flag, nothing to send, a flag that doesn't exist.
        """
        fault = ""
        if flags not in {0, FINAL}:
            fault = f"The flags must be 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL (1), got {flags!r}."
        elif response is None and not flags:
            fault = "Without the final flag there must be a response."
        elif response is not None and not isinstance(response, InferenceResponse):
            fault = f"It must be a pb_utils.InferenceResponse, got {type(response).__name__}."
        if not fault:
            try:
                self._outlet.put(response, final=flags == FINAL)
            except ValueError as error:
                fault = str(error)
        if fault:
            raise TritonModelException(f"Unable to send response. {fault}")


class InferenceRequest:
    """What a client asks.

    Models receive these. One that a model makes itself, to call another model, can't be executed yet.

    Attributes:
        is_cancelled: call it to learn whether the client has left; cheap enough for each step of a loop.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: Any = None,
        trace: Any = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        self._requested = list(requested_output_names)
        self._model = model_name, model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters = _checked_parameters(parameters)
        self._outlet: Outlet | None = None
        self.is_cancelled: Callable[[], bool] = _never

    @classmethod
    def received(
        cls, request: InferRequest, inputs: Sequence[Tensor], outputs: Sequence[str], outlet: Outlet
    ) -> InferenceRequest:
        """A client's request; for the runner, not for models.

        Args:
            request: as the server decoded it.
            inputs: its tensors, as the model sees them.
            outputs: the names of all of the model's outputs, for a request that names none.
            outlet: where a sender's responses go.
        """
        own = {key: value for key, value in request.parameters.items() if key not in _KNOWN_PARAMETERS}
        get = request.parameters.get
        sequence, timeout = get("sequence_id", 0), get("timeout", 0)
        self = cls(
            request_id=request.id,
            correlation_id=sequence if isinstance(sequence, (int, str)) else 0,
            inputs=inputs,
            requested_output_names=request.requested_outputs or outputs,
            model_name=request.model_name,
            model_version=int(request.model_version) if request.model_version.isdecimal() else -1,
            flags=bool(get("sequence_start", False)) | bool(get("sequence_end", False)) << 1,
            timeout=timeout if isinstance(timeout, int) else 0,
            parameters=own,
        )
        self._outlet = outlet
        self.is_cancelled = request.is_cancelled
        return self

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._requested

    def model_name(self) -> str:
        return self._model[0]

    def model_version(self) -> int:
        return self._model[1]

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The request's own, in microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's own parameters as JSON text."""
        return json.dumps(self._parameters)

    def preferred_memory(self) -> Any:
        return self._preferred_memory

    def trace(self) -> Any:
        return self._trace

    def set_release_flags(self, flags: int) -> None:
        if flags & RESCHEDULE:
            unsupported("rescheduling a request (TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)")

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of this request's responses.

        Raises:
            TritonModelException: the request isn't a client's.
        """
        if self._outlet is None:
            raise TritonModelException("only a request that execute() was given has a response sender")
        self._outlet.promise()
        return InferenceResponseSender(self._outlet, self.is_cancelled)

    def exec(self, decoupled: bool = False) -> NoReturn:
        unsupported("calling a model from a model (InferenceRequest.exec)")

    def async_exec(self, decoupled: bool = False) -> NoReturn:
        unsupported("calling a model from a model (InferenceRequest.async_exec)")


# The server acts on these itself; a model sees them through other methods.
_KNOWN_PARAMETERS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
)


def _checked_parameters(parameters: Mapping[Any, Any] | None) -> dict[str, Any]:
    checked = dict(parameters or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            kind = type(value).__name__
            raise TritonModelException(f"parameter {key!r} must be a str, int, float or bool by name, got {kind}")
    return checked
