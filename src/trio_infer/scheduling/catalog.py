"""The models that are served, by name and version: what a request finds, and nothing that takes time.

Models come and go while the server runs; `control` decides that, and publishes a model's versions here all at once, so
that a request finds the old ones or the new ones, and never a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trio_infer.errors import ErrorCode, InferError
from trio_infer.scheduling.served import ServedModel

__all__ = ["Catalog", "ServedModel"]


class Catalog:
    """All models that are served. It is empty at first."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, ServedModel]] = {}
        self._newest: dict[str, ServedModel] = {}
        self._known: dict[str, set[str]] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        for versions in self._models.values():
            yield from versions.values()

    # -- For control ------------------------------------------------------------------------------------------------

    def know(self, name: str, versions: Iterable[str] = ()) -> None:
        """There is a model of that name, whether it is ready or not."""
        self._known.setdefault(name, set()).update(versions)

    def publish(self, name: str, models: Iterable[ServedModel]) -> None:
        """Serve these versions of a model, which are loaded, in place of those that were served.

        What takes another one's place inherits the requests that were on their way to it.
        """
        old = self._models.get(name, {})
        new = {model.signature.version: model for model in models}
        self.know(name, new)
        self._models[name] = new
        self._newest[name] = new[max(new, key=int)]
        for model in new.values():
            model.ready = True
        for version, model in old.items():
            model.ready = False
            model.successor = new.get(version)
        self._forget_what_came_of(name)

    def withdraw(self, name: str) -> None:
        """Serve a model no more; it stays known."""
        for model in self._models.pop(name, {}).values():
            model.ready = False
        self._newest.pop(name, None)
        self._forget_what_came_of(name)

    def _forget_what_came_of(self, name: str) -> None:
        """Ensembles with a step that asks this model, at any depth, don't answer as before."""
        changed = {name}
        while True:
            more = [model for model in self if changed & set(model.requires) and model.signature.name not in changed]
            if not more:
                return
            for model in more:
                model.forget()
            changed |= {model.signature.name for model in more}

    # -- For requests -----------------------------------------------------------------------------------------------

    def versions(self, name: str) -> list[str]:
        """The versions of a model that are ready, lowest first."""
        return sorted(self._models.get(name, ()), key=int)

    def knows(self, name: str, version: str | None = None) -> bool:
        """Whether there is such a model, ready or not."""
        return name in self._known and (version is None or version in self._known[name])

    def find(self, name: str, version: str | None) -> ServedModel | None:
        """The model of that name, if it is ready.

        Args:
            version: None for the highest that is ready.
        """
        return self._newest.get(name) if version is None else self._models.get(name, {}).get(version)

    def find_ready(self, name: str, version: str | None) -> ServedModel:
        """As `find`, but it must be ready.

        Raises:
            InferError: NOT_FOUND or UNAVAILABLE, in Triton's words.
        """
        model = self.find(name, version)
        if model is not None:
            return model
        if not self.knows(name):
            raise InferError(f"Request for unknown model: '{name}' is not found", ErrorCode.NOT_FOUND)
        if version is None:
            raise InferError(f"Request for unknown model: '{name}' has no available versions", ErrorCode.NOT_FOUND)
        if not self.knows(name, version):
            raise InferError(f"Request for unknown model: '{name}' version {version} is not found", ErrorCode.NOT_FOUND)
        raise InferError(
            f"Request for unknown model: '{name}' version {version} is not at ready state", ErrorCode.UNAVAILABLE
        )
