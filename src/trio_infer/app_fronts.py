"""Which ports the command opens, by its options and by what cloud platforms put into a container's environment.

Vertex AI says `AIP_MODE=PREDICTION` and calls one port only; as with Triton, that alone then opens its front and closes
the main port. SageMaker has to be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, get_args

import attrs

from trio_infer.api.fronts import Front
from trio_infer.api.repository import load_runners
from trio_infer.api.sagemaker import DEFAULT_MODEL, InferenceType, SageMaker
from trio_infer.api.statistics import metrics_port
from trio_infer.api.v2 import V2
from trio_infer.api.vertex_ai import VertexAI
from trio_infer.errors import SetupError
from trio_infer.models.repository import Prepared, load_model
from trio_infer.options import CloudFronts, Options
from trio_infer.scheduling.control import ModelControl

__all__ = ["check_safe_range", "cloud_fronts", "cloud_repository", "further_ports", "main_port_is_open"]

INFERENCE_TYPE: Final = "SAGEMAKER_TRITON_INFERENCE_TYPE"


def on_vertex_ai(options: Options, environment: Mapping[str, str]) -> bool:
    """Whether the front of Vertex AI is wanted."""
    wanted = options.cloud.allow_vertex_ai
    return environment.get("AIP_MODE") == "PREDICTION" if wanted is None else wanted


def main_port_is_open(options: Options, environment: Mapping[str, str]) -> bool:
    """Whether the protocol itself is served."""
    if options.allow_http is None:
        return not (options.cloud.allow_vertex_ai is None and on_vertex_ai(options, environment))
    return options.allow_http


def cloud_repository(options: Options, environment: Mapping[str, str]) -> Options:
    """The options, with the repository that Vertex AI names if they name none.

    Raises:
        SetupError: it is not on this machine.
    """
    uri = environment.get("AIP_STORAGE_URI", "")
    if options.model_repository or not uri or not on_vertex_ai(options, environment):
        return options
    if "://" in uri:
        raise SetupError(f"AIP_STORAGE_URI must be a directory on this machine, got {uri}: copy it, or mount it")
    return attrs.evolve(options, model_repository=(Path(uri),))


def further_ports(options: Options, environment: Mapping[str, str]) -> list[Front]:
    """The ports besides the main one.

    Raises:
        SetupError: options or environment say something that can't be; or there is nothing to serve on.
    """
    fronts = cloud_fronts(options, environment)
    main = main_port_is_open(options, environment)
    if not main and not fronts:
        raise SetupError("there is no port to serve on: --allow-http is false, and no other front is allowed")
    if options.allow_metrics:
        host = options.http_address if options.metrics_address is None else options.metrics_address
        fronts.append(Front("metrics", metrics_port, host=host, port=options.metrics_port))
    check_safe_range(options.cloud, options.http_port if main else None, fronts)
    return fronts


def cloud_fronts(options: Options, environment: Mapping[str, str]) -> list[Front]:
    """The ports that cloud platforms call.

    Raises:
        SetupError: the environment says something that can't be.
    """
    cloud, fronts = options.cloud, []
    if cloud.allow_sagemaker:
        fronts.append(_sagemaker(options, environment))
    if on_vertex_ai(options, environment):
        fronts.append(_vertex_ai(options, environment))
    return fronts


def check_safe_range(cloud: CloudFronts, http_port: int | None, fronts: Sequence[Front]) -> None:
    """See to it that all ports but SageMaker's own are those that SageMaker leaves to the container.

    Args:
        http_port: the main port, if it is open.
        fronts: all others.

    Raises:
        SetupError: one is not.
    """
    if not cloud.allow_sagemaker or cloud.sagemaker_safe_port_range is None:
        return
    first, _, last = cloud.sagemaker_safe_port_range.partition("-")
    ports = {} if http_port is None else {"http": http_port}
    for kind, port in (ports | {front.kind: front.port for front in fronts if front.kind != "sagemaker"}).items():
        if port and not int(first) <= port <= int(last):
            raise SetupError(f"--{kind}-port must be within --sagemaker-safe-port-range {first}-{last}, got {port}")


def _sagemaker(options: Options, environment: Mapping[str, str]) -> Front:
    cloud = options.cloud
    kinds = {kind: kind for kind in get_args(InferenceType)}
    wanted = environment.get(INFERENCE_TYPE) or "infer"
    if wanted not in kinds:
        raise SetupError(f"{INFERENCE_TYPE} must be {' or '.join(kinds)}, got {wanted!r}")

    def application(v2: V2) -> SageMaker:
        explicit = options.control.model_control_mode == "explicit"
        return SageMaker(
            v2,
            model=environment.get(DEFAULT_MODEL) or None,
            inference_type=kinds[wanted],
            directories=_Directories(v2.control, options) if explicit else None,
        )

    host = options.http_address if cloud.sagemaker_address is None else cloud.sagemaker_address
    return Front("sagemaker", application, host=host, port=cloud.sagemaker_port)


@attrs.frozen
class _Directories:
    """Loads models from directories that SageMaker has put on disk: a model's own, or one with nothing else in it."""

    control: ModelControl
    options: Options

    async def load_directory(self, name: str, directory: Path) -> None:
        await load_runners(self.control, name, partial(self._prepare, name, directory))

    def _prepare(self, name: str, directory: Path) -> Prepared:
        inner = [entry for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        if len(inner) == 1 and not inner[0].name.isdecimal() and not (directory / "config.pbtxt").is_file():
            directory = inner[0]
        runners = load_model(
            directory, name=name, auto_complete=self.options.auto_complete, execution=self.options.execution
        )
        return Prepared(name, tuple(runners))

    async def unload(self, name: str) -> None:
        await self.control.unload(name)


def _vertex_ai(options: Options, environment: Mapping[str, str]) -> Front:
    cloud = options.cloud
    application = partial(
        VertexAI,
        health_route=_route(environment, "AIP_HEALTH_ROUTE", "/health"),
        predict_route=_route(environment, "AIP_PREDICT_ROUTE", "/predict"),
        model=cloud.vertex_ai_default_model,
    )
    host = options.http_address if cloud.vertex_ai_address is None else cloud.vertex_ai_address
    return Front("vertex-ai", application, host=host, port=_vertex_ai_port(cloud, environment))


def _route(environment: Mapping[str, str], variable: str, default: str) -> str:
    route = environment.get(variable) or default
    if not route.startswith("/"):
        raise SetupError(f"{variable} must be a path that begins with a slash, got {route!r}")
    return route


def _vertex_ai_port(cloud: CloudFronts, environment: Mapping[str, str]) -> int:
    if cloud.vertex_ai_port is not None:
        return cloud.vertex_ai_port
    port = environment.get("AIP_HTTP_PORT") or "8080"
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise SetupError(f"AIP_HTTP_PORT must be a port, from 0 to 65535, got {port!r}")
    return int(port)
