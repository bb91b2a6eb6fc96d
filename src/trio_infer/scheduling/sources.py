"""Where models come from, as `control` sees it, and what it says of how they stand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio

from trio_infer.errors import ModelLoadError
from trio_infer.models.runner import Runner

__all__ = ["LoadWatcher", "ModelSet", "ModelSource", "State", "in_thread", "plan_poll", "read_model"]


class ModelSet(Protocol):
    """One model's versions, read but not loaded."""

    @property
    def runners(self) -> Sequence[Runner]: ...

    def dispose(self) -> None:
        """Remove what lies on disk only for them; may block."""


class ModelSource(Protocol):
    """Where models come from; each method may block, and is called in a thread."""

    def scan(self) -> Mapping[str, str]:
        """The names of all models, and why one can't be served, or ""."""

    def fingerprint(self, name: str) -> Hashable:
        """Changes when the model's files do."""

    def prepare(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] = {}) -> ModelSet:
        """Read a model. Raises ModelLoadError."""


class LoadWatcher(Protocol):
    """Is told of models that come and go."""

    def model_loaded(self, name: str, version: str, *, decoupled: bool, cached: bool, seconds: float) -> None:
        """A version of a model is served; loading it took so long."""

    def model_unloaded(self, name: str, version: str) -> None:
        """It is served no more, and no other is in its place."""


@attrs.frozen
class State:
    """How one version of a model stands.

    Attributes:
        state: READY, LOADING, UNLOADING or UNAVAILABLE, as Triton calls them.
        reason: why it isn't ready.
    """

    state: str
    reason: str = ""


def plan_poll(known: Mapping[str, Hashable], found: Mapping[str, Hashable]) -> tuple[list[str], list[str]]:
    """What a look at the repositories calls for.

    Args:
        known: fingerprints at the last look, by name.
        found: those of now.

    Returns:
        which to load (new, or changed), and which to unload (not there any more), by name.
    """
    load = sorted(name for name in found if name not in known or known[name] != found[name])
    return load, sorted(name for name in known if name not in found)


async def read_model(name: str, prepare: Callable[[], ModelSet]) -> ModelSet:
    """Read a model in a thread.

    Raises:
        ModelLoadError: it can't be, also if that is the disk's fault: a repository may vanish under a running server.

    Cancellation: leaves at once; what is read all the same is disposed of.
    """

    def read() -> ModelSet:
        try:
            prepared = prepare()
        except OSError as error:
            raise ModelLoadError(name, f"it can't be read: {error}") from error
        try:
            trio.from_thread.check_cancelled()
        except BaseException:
            prepared.dispose()
            raise
        return prepared

    result: ModelSet = await in_thread(read)
    return result


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call what may block.

    Cancellation: leaves at once, and the call goes on.
    """
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
