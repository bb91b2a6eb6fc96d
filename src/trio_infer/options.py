"""The server's options: one class, from which flags, environment variables and the keys of a TOML file all come.

`Options` is plain: make one in Python, or let the command make it. An attribute `http_port` is the flag `--http-port`,
the variable `TRIO_INFER_HTTP_PORT` and the key `http-port`; its documentation is the flag's help, its default the
default. The values of the classes in it, such as `Limits`, are options of the same rank, without a prefix. How the
three are read is in `option_sources.py`.

Names and meanings are Triton's wherever Triton has such an option, so that its command lines work here. Those of its
options that mean nothing to this server are accepted all the same (`option_ignored.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import attrs
from attrs import validators
from cyclopts import Group, Parameter

from trio_infer.errors import SetupError
from trio_infer.limits import ControlPolicy, DisconnectPolicy, Keepalive, Limits, RateLimit
from trio_infer.observe.log_settings import FORMATS, LogFormat
from trio_infer.observe.trace_settings import TraceOptions
from trio_infer.option_ignored import Ignored, IgnoredGRPC

__all__ = ["MODELS", "CloudFronts", "Options"]

MODELS: Final = Group("Model repository", sort_key=1)
_CONTROL: Final = Group("Which models are loaded, and when", sort_key=2)
_RATE: Final = Group("Resources that instances share", sort_key=3)
_HTTP: Final = Group("HTTP", sort_key=4)
_CLOUD: Final = Group("Fronts for cloud platforms", sort_key=10)
_LIMITS: Final = Group("Limits", sort_key=20)
_DISCONNECTS: Final = Group("Disconnects", sort_key=21)
_KEEPALIVE: Final = Group("TCP keepalive", sort_key=22)
_TLS: Final = Group("TLS", sort_key=23)
_SHUTDOWN: Final = Group("Shutdown", sort_key=24)
_CACHE: Final = Group("Response cache", sort_key=19)
_METRICS: Final = Group("Metrics", sort_key=25)
_LOGGING: Final = Group("Logging", sort_key=26)
_TRACING: Final = Group("Tracing", sort_key=27)
_FILE: Final = Group("Configuration file", sort_key=28)
_GRPC: Final = Group("Triton's gRPC options: accepted, and nothing is listening there", sort_key=98)
_IGNORED: Final = Group("Other options of Triton: accepted, of no effect, and warned of", sort_key=99)


def _port(instance: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"{attribute.name} must be from 0 to 65535, got {value}")


def _port_range(instance: object, attribute: attrs.Attribute[Any], value: str) -> None:
    first, dash, last = value.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= 65535):
        raise ValueError(f"{attribute.name} must be FIRST-LAST, two ports, got {value!r}")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must be 0 or more, got {value}")


@attrs.frozen(kw_only=True)
class CloudFronts:
    """The ports that cloud platforms call.

    Attributes:
        allow_sagemaker: serve Amazon SageMaker's routes, /ping and /invocations, on a port of their own.
        sagemaker_port: port for them.
        sagemaker_address: name or address to listen on for them; without it, that of `--http-address`.
        sagemaker_safe_port_range: FIRST-LAST: ports that the other fronts must be within (SageMaker gives a container
            such a range).
        allow_vertex_ai: serve Google Vertex AI's routes on a port of their own; without it, they are served if the
            environment says AIP_MODE=PREDICTION, and the main port is then closed unless `--allow-http` is given.
        vertex_ai_port: port for them; without it, AIP_HTTP_PORT from the environment, else 8080.
        vertex_ai_address: name or address to listen on for them; without it, that of `--http-address`.
        vertex_ai_default_model: the model that predictions are asked of; not needed if there is only one.
    """

    allow_sagemaker: bool = False
    sagemaker_port: int = attrs.field(default=8080, validator=_port)
    sagemaker_address: str | None = None
    sagemaker_safe_port_range: str | None = attrs.field(
        default=None,
        validator=validators.optional(_port_range),
    )
    allow_vertex_ai: bool | None = None
    vertex_ai_port: int | None = attrs.field(default=None, validator=validators.optional(_port))
    vertex_ai_address: str | None = None
    vertex_ai_default_model: str | None = None


@attrs.frozen(kw_only=True)
class Options:
    """All that the command can be told.

    Attributes:
        model_repository: directory of models: MODEL/config.pbtxt and MODEL/VERSION/model.py in it; may be given several
            times. With none, models to try the server with are served.
        allow_http: serve the protocol itself on the main port; on unless AIP_MODE=PREDICTION.
        execution: where Triton's Python models run unless their config.pbtxt says: each instance in a process of its
            own, or in threads of the server. (Triton: processes.)
        http_address: name or address to listen on. (Triton: 0.0.0.0, that is, all the world; say so if you want that.)
        http_port: port to listen on; 0 picks a free one.
        reuse_http_port: share the port with other processes that do so, too (SO_REUSEPORT).
        http_header_forward_pattern: regular expression; request headers whose names match it, anywhere and in any case,
            become parameters of infer requests.
        http_restricted_api: CATEGORY[,CATEGORY...]:HEADER=VALUE; endpoints of these categories are answered only to who
            sends that header with that value; may be given several times. (Categories: health, metadata, inference,
            shared-memory, model-config, model-repository, statistics, trace, logging.)
        allow_client_shm: clients may register shared memory of this machine, and pass tensors through it; for trusted
            clients only. (Triton: false, too.)
        id: the server's name in its metadata. (Triton: triton.)
        bad_json_status: what a request with unreadable JSON is answered. (Triton: 500; choose 400 if your alarms count
            5xx.)
        cloud: the ports that cloud platforms call.
        cache_config: local,size=BYTES: keep answers of models with `response_cache` in so much memory; without it,
            none are kept.
        response_cache_byte_size: the same as BYTES alone, by its older name; 0 for no cache.
        limits: bounds on what clients may take.
        disable_auto_complete_config: don't ask Python models to complete their configuration.
        strict_model_config: the same, by its older name.
        control: which models are loaded, and when.
        rate: what instances share.
        disconnects: what counts as a client that left, and what happens then.
        keepalive: how TCP notices peers that vanished.
        ssl_certfile: serve https, with this certificate chain (PEM).
        ssl_keyfile: its private key (PEM), if not in the same file.
        exit_timeout_secs: seconds that requests in hand have to finish after SIGTERM or Ctrl-C; a second signal stops
            them at once. (Triton: 30.)
        allow_metrics: serve metrics for Prometheus: at /metrics of the main port, and on a port of their own.
        metrics_port: that port; 0 picks a free one.
        metrics_address: name or address to listen on for metrics. [default: as --http-address]
        metrics_config: SETTING=VALUE, may be given several times: counter_latencies (true), summary_latencies,
            histogram_latencies (false), summary_quantiles (0.5:0.05,0.9:0.01,...).
        metrics_interval_ms: milliseconds for which a look at the machine's CPU and memory holds. (Triton: 2000.)
        allow_cpu_metrics: metrics on the machine's CPU and memory.
        allow_gpu_metrics: accepted and ignored: there are none on GPUs.
        log_verbose: 1 logs more, and tracebacks of models that can't be loaded; 2 also logs what libraries have to say.
        log_info: log what is not a warning, such as clients that leave.
        log_warning: log what may become a trouble.
        log_error: log what went wrong.
        log_format: how a line begins: with Triton's severity and time in one word, or with a time as in ISO 8601.
        log_file: where the log goes, if not to stderr. It is made anew when it is moved away.
        traces: which requests are traced, and where to.
        access_log: log each request; those that are cancelled are logged anyway.
        config: TOML file with these options, without the dashes in front.
        grpc: Triton's, accepted quietly.
        ignored: Triton's, accepted with a warning.
    """

    model_repository: Annotated[
        tuple[Path, ...],
        Parameter(
            name=("--model-repository", "--model-store"),
            group=MODELS,
            negative=(),
            show_default=False,
            metavar="DIRECTORY",
        ),
    ] = ()
    allow_http: Annotated[bool | None, Parameter(group=_HTTP)] = None
    execution: Annotated[Literal["process", "thread"], Parameter(group=MODELS)] = attrs.field(
        default="process", validator=validators.in_(("process", "thread"))
    )
    http_address: Annotated[str, Parameter(group=_HTTP)] = "127.0.0.1"
    http_port: Annotated[int, Parameter(group=_HTTP)] = attrs.field(default=8000, validator=_port)
    reuse_http_port: Annotated[bool, Parameter(group=_HTTP)] = False
    http_header_forward_pattern: Annotated[str, Parameter(group=_HTTP, show_default=False)] = ""
    http_restricted_api: Annotated[tuple[str, ...], Parameter(group=_HTTP, negative=(), show_default=False)] = ()
    allow_client_shm: Annotated[bool, Parameter(group=_HTTP)] = False
    id: Annotated[str, Parameter(group=_HTTP)] = "trio-infer"
    bad_json_status: Annotated[Literal[500, 400], Parameter(group=_HTTP)] = attrs.field(
        default=500, validator=validators.in_((500, 400))
    )
    cloud: Annotated[CloudFronts, Parameter(name="*", group=_CLOUD)] = attrs.field(factory=CloudFronts)
    cache_config: Annotated[tuple[str, ...], Parameter(group=_CACHE, negative=(), show_default=False)] = ()
    response_cache_byte_size: Annotated[int, Parameter(group=_CACHE)] = attrs.field(default=0, validator=_not_negative)
    limits: Annotated[Limits, Parameter(name="*", group=_LIMITS)] = attrs.field(factory=Limits)
    disable_auto_complete_config: Annotated[bool, Parameter(group=MODELS)] = False
    strict_model_config: Annotated[bool, Parameter(group=MODELS)] = False
    control: Annotated[ControlPolicy, Parameter(name="*", group=_CONTROL)] = attrs.field(factory=ControlPolicy)
    rate: Annotated[RateLimit, Parameter(name="*", group=_RATE, negative=())] = attrs.field(factory=RateLimit)
    disconnects: Annotated[DisconnectPolicy, Parameter(name="*", group=_DISCONNECTS)] = attrs.field(
        factory=DisconnectPolicy
    )
    keepalive: Annotated[Keepalive, Parameter(name="*", group=_KEEPALIVE)] = attrs.field(factory=Keepalive)
    ssl_certfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    ssl_keyfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    exit_timeout_secs: Annotated[float, Parameter(group=_SHUTDOWN)] = attrs.field(default=30.0, validator=_not_negative)
    allow_metrics: Annotated[bool, Parameter(group=_METRICS)] = True
    metrics_port: Annotated[int, Parameter(group=_METRICS)] = attrs.field(default=8002, validator=_port)
    metrics_address: Annotated[str | None, Parameter(group=_METRICS)] = None
    metrics_config: Annotated[tuple[str, ...], Parameter(group=_METRICS, negative=(), show_default=False)] = ()
    metrics_interval_ms: Annotated[float, Parameter(group=_METRICS)] = attrs.field(
        default=2000.0, validator=_not_negative
    )
    allow_cpu_metrics: Annotated[bool, Parameter(group=_METRICS)] = True
    allow_gpu_metrics: Annotated[bool, Parameter(group=_METRICS)] = True
    log_verbose: Annotated[int, Parameter(group=_LOGGING)] = attrs.field(default=0, validator=_not_negative)
    log_info: Annotated[bool, Parameter(group=_LOGGING)] = True
    log_warning: Annotated[bool, Parameter(group=_LOGGING)] = True
    log_error: Annotated[bool, Parameter(group=_LOGGING)] = True
    log_format: Annotated[LogFormat, Parameter(group=_LOGGING)] = attrs.field(
        default="default", validator=validators.in_(FORMATS)
    )
    log_file: Annotated[Path | None, Parameter(group=_LOGGING)] = None
    traces: Annotated[TraceOptions, Parameter(name="*", group=_TRACING, negative=())] = attrs.field(
        factory=TraceOptions
    )
    access_log: Annotated[bool, Parameter(group=_LOGGING)] = False
    config: Annotated[Path | None, Parameter(group=_FILE)] = None
    grpc: Annotated[IgnoredGRPC, Parameter(name="*", group=_GRPC, show=False, negative=())] = attrs.field(
        factory=IgnoredGRPC
    )
    ignored: Annotated[Ignored, Parameter(name="*", group=_IGNORED, negative=())] = attrs.field(factory=Ignored)

    @property
    def response_cache(self) -> int:
        """Bytes for the response cache; 0 for none.

        Raises:
            SetupError: `cache_config` says something else than how large a local cache is.
        """
        size = self.response_cache_byte_size
        for setting in self.cache_config:
            name, comma, rest = setting.partition(",")
            key, equals, value = rest.partition("=")
            if not comma or name != "local":
                raise SetupError(f"--cache-config must be local,size=BYTES, got '{setting}': there is no other cache")
            if not equals or key != "size" or not value.isdecimal():
                raise SetupError(f"--cache-config must be local,size=BYTES, a whole number, got '{setting}'")
            size = int(value)
        return size

    @property
    def auto_complete(self) -> bool:
        """Whether Python models are asked to complete their configuration."""
        return not (self.disable_auto_complete_config or self.strict_model_config)
