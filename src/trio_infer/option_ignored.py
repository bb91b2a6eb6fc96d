"""Options of Triton that mean nothing to this server, accepted so that its command lines work as they are."""

from __future__ import annotations

import re

import attrs

__all__ = ["Ignored", "IgnoredGRPC"]


@attrs.frozen(kw_only=True)
class IgnoredGRPC:
    """What Triton is told of its gRPC front end; there is none here.

    Attributes:
        allow_grpc: whether there is one.
        grpc_port: its port.
        reuse_grpc_port: whether it shares that.
        grpc_address: its address.
        grpc_header_forward_pattern: headers that it hands to models.
        grpc_infer_thread_count: its threads.
        grpc_infer_allocation_pool_size: states that it keeps.
        grpc_max_response_pool_size: responses that it keeps.
        grpc_use_ssl: whether it speaks TLS.
        grpc_use_ssl_mutual: whether its clients need certificates.
        grpc_server_cert: its certificate.
        grpc_server_key: its key.
        grpc_root_cert: who signs its clients' certificates.
        grpc_infer_response_compression_level: how much it compresses.
        grpc_keepalive_time: milliseconds between its pings.
        grpc_keepalive_timeout: milliseconds for a ping's answer.
        grpc_keepalive_permit_without_calls: whether it pings idle clients.
        grpc_http2_max_pings_without_data: pings in a row.
        grpc_http2_min_recv_ping_interval_without_data: milliseconds between its clients' pings.
        grpc_http2_max_ping_strikes: how many bad pings it bears.
        grpc_max_connection_age: milliseconds that a connection may live.
        grpc_max_connection_age_grace: milliseconds after that.
        grpc_restricted_protocol: calls that need a header.
    """

    allow_grpc: bool | None = None
    grpc_port: str | None = None
    reuse_grpc_port: bool | None = None
    grpc_address: str | None = None
    grpc_header_forward_pattern: str | None = None
    grpc_infer_thread_count: str | None = None
    grpc_infer_allocation_pool_size: str | None = None
    grpc_max_response_pool_size: str | None = None
    grpc_use_ssl: bool | None = None
    grpc_use_ssl_mutual: bool | None = None
    grpc_server_cert: str | None = None
    grpc_server_key: str | None = None
    grpc_root_cert: str | None = None
    grpc_infer_response_compression_level: str | None = None
    grpc_keepalive_time: str | None = None
    grpc_keepalive_timeout: str | None = None
    grpc_keepalive_permit_without_calls: bool | None = None
    grpc_http2_max_pings_without_data: str | None = None
    grpc_http2_min_recv_ping_interval_without_data: str | None = None
    grpc_http2_max_ping_strikes: str | None = None
    grpc_max_connection_age: str | None = None
    grpc_max_connection_age_grace: str | None = None
    grpc_restricted_protocol: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Ignored:
    """What Triton is told of things that are not here.

    Attributes:
        http_thread_count: one event loop serves all connections.
        sagemaker_thread_count: one event loop serves all connections.
        vertex_ai_thread_count: one event loop serves all connections.
        backend_directory: backends are part of the server.
        backend_config: backends have no settings here.
        repoagent_directory: there are no repository agents.
        cache_directory: the response cache is part of the server.
        pinned_memory_pool_byte_size: there is no pinned memory.
        cuda_memory_pool_byte_size: the server itself uses no GPU.
        cuda_virtual_address_size: the server itself uses no GPU.
        min_supported_compute_capability: the server itself uses no GPU.
        enable_peer_access: the server itself uses no GPU.
        model_load_gpu_limit: the server itself uses no GPU.
        host_policy: threads and memory are not bound to nodes.
        model_namespacing: names of models are unique in all repositories.
        buffer_manager_thread_count: tensors are not copied by threads.
    """

    http_thread_count: str | None = None
    sagemaker_thread_count: str | None = None
    vertex_ai_thread_count: str | None = None
    backend_directory: str | None = None
    backend_config: tuple[str, ...] = ()
    repoagent_directory: str | None = None
    cache_directory: str | None = None
    pinned_memory_pool_byte_size: str | None = None
    cuda_memory_pool_byte_size: tuple[str, ...] = ()
    cuda_virtual_address_size: tuple[str, ...] = ()
    min_supported_compute_capability: str | None = None
    enable_peer_access: bool | None = None
    model_load_gpu_limit: tuple[str, ...] = ()
    host_policy: tuple[str, ...] = ()
    model_namespacing: bool | None = None
    buffer_manager_thread_count: str | None = None

    def reasons(self) -> dict[str, str]:
        """Of the options that were given, by their names as flags, why they have no effect."""
        given = attrs.asdict(self, recurse=False)
        return {f"--{name.replace('_', '-')}": text for name, text in REASONS.items() if given[name] not in (None, ())}


REASONS = dict(re.findall(r"^ +(\w+): (.+)\.$", Ignored.__doc__ or "", re.MULTILINE))  # from 3.13 on less indented
