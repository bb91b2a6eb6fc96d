"""Which path means what. The raw, undecoded path is matched as a whole; a query is ignored (both as Triton does)."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

import attrs

__all__ = ["CATEGORY_OF", "Route", "find_route"]


@attrs.frozen
class Route:
    """What a path asks for.

    Args:
        action: "live", "ready", "server", or of a model "metadata", "model_ready", "config", "infer", "generate",
            "generate_stream", "cancel", "load", "unload"; and so on, see `_FIXED`.
        methods: that it may be asked with.
        model: the model's name, as it stands in the path; "" if none is asked for.
        version: None for whichever is newest.
        rest: what else is in the path: of "shared_memory" the kind, the operation, and the region's name, or "".
    """

    action: str
    methods: tuple[str, ...]
    model: str = ""
    version: str | None = None
    rest: tuple[str, ...] = ()

    @property
    def category(self) -> str:
        """What it belongs to where APIs are restricted; see `restrictions.CATEGORIES`."""
        return CATEGORY_OF[self.action]


CATEGORY_OF: Final = {
    "live": "health",
    "ready": "health",
    "model_ready": "health",
    "server": "metadata",
    "metadata": "metadata",
    "config": "model-config",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "cancel": "inference",
    "index": "model-repository",
    "load": "model-repository",
    "unload": "model-repository",
    "no_repository_names": "model-repository",
    "statistics": "statistics",
    "metrics": "statistics",
    "logging": "logging",
    "trace_setting": "trace",
    "shared_memory": "shared-memory",
}

_READ: Final = ("GET", "HEAD")
_RUN: Final = ("POST",)
_CHANGE: Final = ("GET", "POST")

_FIXED: Final = {
    "/v2": Route("server", _READ),
    "/v2/health/live": Route("live", _READ),
    "/v2/health/ready": Route("ready", _READ),
    "/v2/models/stats": Route("statistics", _READ),
    "/v2/logging": Route("logging", _CHANGE),
    "/v2/trace/setting": Route("trace_setting", _CHANGE),
    "/v2/repository/index": Route("index", _RUN),
    "/metrics": Route("metrics", _READ),
    "/metrics/": Route("metrics", _READ),
}

_MODEL: Final = re.compile(
    r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
    r"(?:/(?P<action>ready|config|infer|generate|generate_stream|cancel|stats|trace/setting))?"
)
_ACTIONS: Final = {
    None: ("metadata", _READ),
    "ready": ("model_ready", _READ),
    "config": ("config", _READ),
    "infer": ("infer", _RUN),
    "generate": ("generate", _RUN),
    "generate_stream": ("generate_stream", _RUN),
    "cancel": ("cancel", _RUN),
    "stats": ("statistics", _READ),
    "trace/setting": ("trace_setting", _CHANGE),
}

_SHARED_MEMORY: Final = re.compile(
    r"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/(?P<operation>status|register|unregister)"
)

_REPOSITORY: Final = re.compile(
    r"/v2/repository(?P<named>/[^/]+)?/(?:index|models/(?P<model>[^/]+)/(?P<action>load|unload))"
)

_ABSOLUTE: Final = re.compile(r"https?://[^/?]*", re.IGNORECASE)


def find_route(target: str) -> Route | None:
    """The route of a request target, in origin form or in absolute form; None if there is none."""
    path = target.partition("?")[0]
    if not path.startswith("/"):
        path = _ABSOLUTE.sub("", path, count=1) or "/"
    if path in _FIXED:
        return _FIXED[path]
    match = _SHARED_MEMORY.fullmatch(path)
    if match is not None:
        kind, region, operation = match.groups()
        # Decoded, unlike models' names: infer requests name the region in JSON, where nothing is encoded.
        rest = (kind, operation, unquote(region or "", errors="replace"))
        return Route("shared_memory", _READ if operation == "status" else _RUN, rest=rest)
    match = _REPOSITORY.fullmatch(path)
    if match is not None:
        return Route("no_repository_names" if match["named"] else match["action"], _RUN, match["model"] or "")
    match = _MODEL.fullmatch(path)
    if match is None or (match["version"] and match["action"] == "trace/setting"):  # versions have none of their own
        return None
    action, methods = _ACTIONS[match["action"]]
    return Route(action, methods, match["model"], match["version"])
