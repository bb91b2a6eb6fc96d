"""Decides which models are served while the server runs: loading, reloading, unloading, and what is told of it.

The facts that it rests on:

- Loads of one model are done one after the other, under its lock; those of different models go on side by side. What is
  decided, is decided synchronously and at once: `Catalog.publish` swaps all versions of a model in one step. What takes
  time (reading disks, importing code, draining) is done before or after, never in between.
- A reload loads the new copy beside the old one, which serves until the new one is ready. If the new one can't be
  loaded, the old one just serves on. So there are two copies for the time of a swap, and never a gap.
- What is taken away *drains*: its requests have `unload_timeout_secs` to finish, then they are cancelled (*model
  unloaded*, 503), then what still runs is killed if it can be. After that its clean-up runs, once. The lock isn't held
  meanwhile: a model may be loaded again while its predecessor drains.
- A job runs in the control's own nursery, not in the task that asked for it. A client that leaves in mid-load, or a
  request of a model that is cancelled, leaves no half state: the load goes on to its end.

A model may load others (Triton's `pb_utils.load_model`), also while it is loaded itself. Two that wait for each other
would wait for ever, so the one that closes the ring is refused. And since a model that unloads itself runs while it
asks, models are answered as soon as what they name is no longer served; only clients wait for the end of the drain.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from trio_infer.errors import ErrorCode, InferError, ModelLoadError, SetupError, UnknownModelError
from trio_infer.limits import ControlPolicy
from trio_infer.models.host import Host
from trio_infer.models.runner import PROMISES, Runner
from trio_infer.scheduling.catalog import Catalog
from trio_infer.scheduling.copies import Copy
from trio_infer.scheduling.resources import Resources
from trio_infer.scheduling.response_cache import ResponseCache
from trio_infer.scheduling.served import ServedModel
from trio_infer.scheduling.sources import LoadWatcher, ModelSet, ModelSource, State, in_thread, plan_poll, read_model

__all__ = ["ModelControl"]

log: logging.Logger = logging.getLogger("trio_infer")

POLLED: Final = "explicit model load / unload is not allowed if polling is enabled"
"""Triton's words, in mode none as well."""

DEEPEST: Final = 50
"""Ensembles below each other; each takes some frames of the stack while it is loaded, and when it is cancelled."""


@attrs.define(eq=False)
class _Entry:
    """What is known of one model."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    states: dict[str, State] = attrs.field(factory=dict)
    reason: str = ""
    wanted: bool = False
    serving: Copy | None = None
    seen: Hashable = None
    """The files' fingerprint when they were last looked at, whatever came of it."""
    served: Hashable = None
    """That of what is served."""
    own: bool = False
    """Whether what is served was loaded with a configuration or files of its own, not from the repository as it is."""
    lacks: str = ""
    """The model, asked by one of its steps, for want of which it couldn't be loaded."""


class ModelControl:
    """The models of one server.

    Args:
        catalog: where they are published.
        source: where they are loaded from; None if there are only those that are given.
        policy: which, and when.
        given: runners by model, to be loaded at the start whatever the policy says.
        host: makes the host of a model of that name.
        watcher: is told of models that come and go.
        cache: for models that are to be cached; None if none is.
        resources: what instances share; None if nothing is rationed.
    """

    def __init__(
        self,
        catalog: Catalog,
        source: ModelSource | None = None,
        policy: ControlPolicy | None = None,
        *,
        given: Mapping[str, Sequence[Runner]] | None = None,
        host: Callable[[str], Host],
        watcher: LoadWatcher | None = None,
        cache: ResponseCache | None = None,
        resources: Resources | None = None,
    ) -> None:
        self._resources = resources
        self._catalog = catalog
        self._source = source
        self.policy: ControlPolicy = policy or ControlPolicy()
        self._given = dict(given or {})
        self._host = host
        self._watcher = watcher
        self._cache = cache
        self._entries: dict[str, _Entry] = {}
        self._copies: set[Copy] = set()
        self._asks: dict[str, str] = {}
        self._nursery: trio.Nursery | None = None

    # -- What is told -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether each model that is meant to be served is; always, if readiness isn't strict."""
        if not self.policy.strict_readiness:
            return True
        return all(entry.serving is not None for entry in self._entries.values() if entry.wanted)

    @property
    def live(self) -> Iterable[ServedModel]:
        """All that are loaded or drain, now."""
        return [model for copy in self._copies for model in copy.models]

    async def index(self) -> list[tuple[str, str, State | None]]:
        """All models, by name: name, version and state; "" and None for one that nobody has tried to load.

        Raises:
            InferError: INTERNAL: a repository can't be read any more.

        Cancellation: just stops looking.
        """
        found: Mapping[str, str] = {}
        if self._source is not None:
            try:
                found = await in_thread(self._source.scan)
            except SetupError as error:
                raise InferError(str(error), ErrorCode.INTERNAL) from None
        rows: list[tuple[str, str, State | None]] = []
        for name in sorted({*found, *self._entries}):
            entry = self._entries.get(name)
            reason = found.get(name) or (entry.reason if entry is not None else "")
            if entry is not None and entry.states:
                versions = sorted(entry.states, key=int)
                rows += [(name, version, entry.states[version]) for version in versions]
            else:
                rows.append((name, "", State("UNAVAILABLE", reason) if reason else None))
        return rows

    # -- The whole --------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load what is to be loaded at the start, then do what is asked for, until cancelled. Call `close` afterwards.

        Raises:
            SetupError: a model can't be loaded, and the policy is to exit on that.

        Cancellation: leaves at once; loads that go on are undone.
        """
        async with trio.open_nursery() as self._nursery:
            await self._begin()
            task_status.started()
            if self.policy.model_control_mode == "poll" and self._source is not None:
                while True:
                    await trio.sleep(self.policy.repository_poll_secs)
                    await self._poll(self._source)
            await trio.sleep_forever()

    async def close(self) -> None:
        """Take down all that is left, without patience: their requests are over.

        Cancellation: leaves at once, and models are not cleaned up; shield it. It has its own time limits.
        """
        async with trio.open_nursery() as nursery:
            for copy in list(self._copies):
                self._catalog.withdraw(copy.name)
                nursery.start_soon(partial(self._take_down, copy, 0.0, at_once=True))

    async def _begin(self) -> None:
        policy, names = self.policy, {}
        if self._source is not None:
            names = dict(await in_thread(self._source.scan))
            if policy.model_control_mode == "explicit" and "*" not in policy.load_model:
                names = {name: names.get(name, "") for name in policy.load_model}
        failures: dict[str, ModelLoadError] = {}
        limiter = trio.CapacityLimiter(policy.model_load_thread_count)

        async def load(name: str, job: Callable[[], Awaitable[None]]) -> None:
            async with limiter:
                try:
                    await job()
                except ModelLoadError as error:
                    failures[name] = error

        for name in [*self._given, *names]:
            self._entry(name).wanted = True
        async with trio.open_nursery() as nursery:
            for name, runners in self._given.items():
                nursery.start_soon(load, name, partial(self._load_given, name, runners))
            for name, reason in names.items():
                if reason:
                    self._entry(name).reason = reason
                    failures[name] = ModelLoadError(name, reason)
                else:
                    nursery.start_soon(load, name, partial(self._load, name, unless_same=True))
        if not failures:
            return
        errors = [failures[name] for name in sorted(failures)]
        if policy.exit_on_error or any(name in self._given for name in failures):
            raise errors[0] if len(errors) == 1 else SetupError("; ".join(map(str, errors)))
        for error in errors:
            log.error("%s; serving without it", error)

    async def _poll(self, source: ModelSource) -> None:
        def look() -> dict[str, Hashable]:
            return {name: source.fingerprint(name) for name, reason in source.scan().items() if not reason}

        try:
            found = await in_thread(look)
        except (OSError, SetupError) as error:
            log.error("the model repositories can't be read: %s", error)
            return
        known = {name: entry.seen for name, entry in self._entries.items() if entry.wanted and name not in self._given}
        load, unload = plan_poll(known, found)
        limiter = trio.CapacityLimiter(self.policy.model_load_thread_count)

        async def reload(name: str) -> None:
            async with limiter:
                try:
                    await self._load(name, unless_same=True)  # an ensemble may have asked for it first
                except ModelLoadError as error:
                    log.error("%s", error)

        async with trio.open_nursery() as nursery:
            for name in load:
                nursery.start_soon(reload, name)
            for name in unload:
                nursery.start_soon(self._unload, name)
        async with trio.open_nursery() as nursery:
            for name, entry in self._entries.items():
                if name in found and entry.lacks and self._serving(entry.lacks) is not None:
                    entry.lacks = ""
                    nursery.start_soon(reload, name)

    # -- On request -------------------------------------------------------------------------------------------------

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it again if its files have changed; returns when it serves.

        Args:
            config: JSON text in place of its configuration file.
            files: contents by path, in place of its files.

        Raises:
            InferError: UNAVAILABLE: the policy is not to load on request.
            ModelLoadError: it can't be loaded; what served before serves on.

        Cancellation: stops waiting; the load goes on.
        """
        self._check_mode()
        await self._in_background(partial(self._load, name, config=config, files=files or {}, unless_same=True))

    async def load_runners(self, name: str, prepare: Callable[[], ModelSet]) -> None:
        """As `load`, from elsewhere than the repositories.

        Args:
            prepare: reads it; called in a thread.
        """
        self._check_mode()
        await self._in_background(partial(self._load_from, name, prepare))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Serve a model no more; returns when its requests have ended and it is cleaned up. No such model is no error.

        Args:
            dependents: of an ensemble: unload the models of its steps, too, but those that another ensemble needs.

        Raises:
            InferError: UNAVAILABLE: the policy is not to unload on request.

        Cancellation: stops waiting; the unload goes on.
        """
        self._check_mode()
        draining: list[Copy] = []

        async def job() -> None:
            names = [name, *self._dependents(name)] if dependents else [name]
            for each in names:
                await self._unload(each)
                draining.extend(copy for copy in self._copies if copy.name == each and copy is not self._serving(each))

        await self._in_background(job)
        for copy in draining:
            await copy.gone.wait()

    def _dependents(self, name: str) -> list[str]:
        """The models that only this one's steps ask, at any depth."""
        needs = {copy.name: copy.requires for copy in self._serving_all()}
        going = [name]
        for one in going:
            others = {need for other, needed in needs.items() if other not in going for need in needed}
            going += [need for need in sorted(needs.get(one, ())) if need not in going and need not in others]
        return going[1:]

    def _serving_all(self) -> list[Copy]:
        return [entry.serving for entry in self._entries.values() if entry.serving is not None]

    async def load_for(self, asker: str, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """As `load`, for a model.

        Args:
            asker: its name.

        Raises:
            InferError: as `load`, and if it can't be loaded, or waits for the asker itself.
        """
        self._check_ring(asker, name)
        loading = asker in self._entries and self._entries[asker].lock.locked()
        if loading:
            self._asks[asker] = name
        try:
            await self.load(name, config=config, files=files)
        except ModelLoadError as error:
            raise InferError(str(error)) from None
        finally:
            if loading:
                self._asks.pop(asker, None)

    async def unload_for(self, asker: str, name: str, *, dependents: bool = False) -> None:
        """As `unload`, for a model; returns when it is served no more."""
        self._check_mode()
        self._check_ring(asker, name)
        for each in [name, *self._dependents(name)] if dependents else [name]:
            await self._in_background(partial(self._unload, each))

    def _check_mode(self) -> None:
        if self.policy.model_control_mode != "explicit":
            raise InferError(POLLED, ErrorCode.UNAVAILABLE)

    def _check_ring(self, asker: str, name: str) -> None:
        if asker not in self._entries or not self._entries[asker].lock.locked():
            return  # it is loaded, so nobody waits for it
        step: str | None = name
        while step is not None:
            if step == asker:
                raise InferError(f"model '{asker}' can't load or unload '{name}' while it is loaded itself for that")
            step = self._asks.get(step)

    async def _in_background(self, job: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is None:
            raise InferError("the server has not started", ErrorCode.UNAVAILABLE)
        done = trio.Event()
        failure: list[Exception] = []

        async def perform() -> None:
            try:
                await job()
            except (SetupError, InferError) as error:
                if isinstance(error, ModelLoadError) and not isinstance(error, UnknownModelError):
                    log.warning("%s", error)  # whoever asked may have left, and need not be who can mend it
                failure.append(error)
            except BaseException:  # Cancelled, perhaps in a group
                failure.append(InferError("cancelled: the server is shutting down", ErrorCode.UNAVAILABLE))
                raise
            finally:
                done.set()

        self._nursery.start_soon(perform)
        await done.wait()
        for error in failure:
            raise error

    # -- Loading ----------------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> _Entry:
        return self._entries.setdefault(name, _Entry())

    def _serving(self, name: str) -> Copy | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.serving

    async def _load(
        self,
        name: str,
        *,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        unless_same: bool = False,
    ) -> None:
        if self._source is None:
            raise UnknownModelError(name, "there is no model repository")
        source = self._source
        own = config is not None or bool(files)
        fresh = name not in self._entries
        entry = self._entry(name)
        async with entry.lock:
            seen = await in_thread(source.fingerprint, name)
            if unless_same and entry.serving is not None and not own and not entry.own and seen == entry.served:
                return
            entry.seen = seen
            tries = 1 + self.policy.model_load_retry_count
            for attempt in range(tries):
                try:
                    prepared = await read_model(name, partial(source.prepare, name, config=config, files=files or {}))
                    await self._bring_up(name, entry, prepared.runners, prepared.dispose)
                except ModelLoadError as error:
                    if attempt + 1 < tries:
                        log.warning("%s; trying again", error)
                        continue
                    if fresh and not entry.states and not await _is_there(source, name):
                        self._entries.pop(name, None)  # a name that somebody made up: nothing is known of it
                    elif entry.serving is None and not entry.states:
                        entry.reason, entry.wanted = error.reason, True
                        self._catalog.know(name)
                    raise
                entry.own, entry.served = own, seen
                return

    async def _load_from(self, name: str, prepare: Callable[[], ModelSet]) -> None:
        entry = self._entry(name)
        async with entry.lock:
            prepared = await read_model(name, prepare)
            await self._bring_up(name, entry, prepared.runners, prepared.dispose)
            entry.own = True

    async def _load_given(self, name: str, runners: Sequence[Runner]) -> None:
        entry = self._entry(name)
        async with entry.lock:
            if entry.serving is not None:
                return  # an ensemble has asked for it first
            await self._bring_up(name, entry, runners, None)

    async def _require_all(self, copy: Copy) -> None:
        for required in sorted(copy.requires):
            await self._require(copy.name, required)

    async def _require(self, asker: str, name: str) -> None:
        """See to it that a model is served that another one's steps ask.

        Raises:
            ModelLoadError: it can't be.
        """
        if self._serving(name) is not None:
            return
        try:
            self._check_ring(asker, name)
            self._check_depth(asker)
            self._asks[asker] = name
            if name in self._given:
                await self._load_given(name, self._given[name])
            else:
                await self._load(name, unless_same=True)
        except (ModelLoadError, InferError) as error:
            self._entry(asker).lacks = name
            raise ModelLoadError(asker, f"one of its steps asks model '{name}': {error}") from None
        finally:
            self._asks.pop(asker, None)

    def _check_depth(self, asker: str) -> None:
        """Whether not too many wait for this one already, each for the next."""
        askers = {asked: who for who, asked in self._asks.items()}
        depth = 1
        while asker in askers:
            asker, depth = askers[asker], depth + 1
        if depth > DEEPEST:
            raise InferError(f"ensembles of ensembles can be {DEEPEST} deep")

    def _check_nesting(self, copy: Copy) -> None:
        """Whether an ensemble that is about to be served does not ask itself, by what is served now."""
        depth, asked = 0, set(copy.requires)
        while asked:
            depth += 1
            if copy.name in asked:
                how = "circular dependency between ensembles: one of its steps asks the ensemble itself"
                raise ModelLoadError(copy.name, how if depth == 1 else f"{how}, {depth - 1} ensembles further")
            if depth > DEEPEST:
                raise ModelLoadError(copy.name, f"ensembles of ensembles can be {DEEPEST} deep")
            served = [found for found in map(self._serving, asked) if found is not None]
            asked = {name for found in served for name in found.requires}

    async def _bring_up(
        self, name: str, entry: _Entry, runners: Sequence[Runner], dispose: Callable[[], None] | None
    ) -> None:
        """Load a model's versions, and swap them in. Under the entry's lock."""
        copy = Copy(name, [ServedModel(runner, self._cache, self._resources) for runner in runners], dispose)
        self._copies.add(copy)
        entry.wanted, entry.reason, entry.lacks = True, "", ""
        versions = [runner.signature.version for runner in runners]
        self._catalog.know(name, versions)
        before = dict(entry.states)
        for version in versions:
            entry.states.setdefault(version, State("LOADING"))
            if entry.serving is None:
                entry.states[version] = State("LOADING")
        failures: list[ModelLoadError] = []
        seconds: dict[ServedModel, float] = {}

        async def load(model: ServedModel) -> None:
            began = time.perf_counter()
            try:
                await model.load(self._host(name))
            except ModelLoadError as error:
                error.version = model.signature.version
                failures.append(error)
            seconds[model] = time.perf_counter() - began

        try:
            await self._require_all(copy)
            async with trio.open_nursery() as nursery:
                for model in copy.models:
                    nursery.start_soon(load, model)
            if failures:
                raise failures[0]
            self._check_nesting(copy)  # in one step with what follows: those that it asks may be replaced, too
        except BaseException as error:
            entry.states = before
            if isinstance(error, ModelLoadError) and entry.serving is None:
                entry.states = {version: State("UNAVAILABLE", error.reason) for version in versions}
            with trio.CancelScope(shield=True):  # each step has its time limit
                await self._take_down(copy, 0.0, at_once=True)
            raise
        old, entry.serving = entry.serving, copy
        entry.states = {version: State("READY") for version in versions}
        self._catalog.publish(name, copy.models)
        self._warn_without_cache(copy)
        for model, took in seconds.items():
            self._tell(model, took)
        if old is not None:
            assert self._nursery is not None
            self._nursery.start_soon(self._take_down, old, self.policy.unload_timeout_secs)

    def _tell(self, model: ServedModel, seconds: float) -> None:
        """Say that a model is ready."""
        name, version = model.signature.name, model.signature.version
        stops = PROMISES[model.stops]
        log.info("model '%s' version %s is ready after %.2f s; a cancelled run stops %s", name, version, seconds, stops)
        if model.stops == "never":
            log.warning(
                "nothing can stop a run of model '%s' in a thread: its instance is taken until it ends, whoever has "
                "left; with the parameter execution 'process' it can be killed",
                name,
            )
        if self._watcher is not None:
            self._watcher.model_loaded(
                name, version, decoupled=model.signature.decoupled, cached=model.cached, seconds=seconds
            )

    def _warn_without_cache(self, copy: Copy) -> None:
        if self._cache is None and any(model.config.response_cache for model in copy.models):
            log.warning(
                "model '%s' is to be cached, and there is no response cache: --cache-config local,size=BYTES makes one",
                copy.name,
            )

    # -- Unloading --------------------------------------------------------------------------------------------------

    async def _unload(self, name: str) -> None:
        """Serve it no more, and begin to drain it."""
        entry = self._entries.get(name)
        if entry is None:
            return
        async with entry.lock:
            entry.wanted = False
            copy, entry.serving = entry.serving, None
            if copy is None:
                return
            entry.states = dict.fromkeys(entry.states, State("UNLOADING"))
            self._catalog.withdraw(name)
            assert self._nursery is not None
            self._nursery.start_soon(self._take_down, copy, self.policy.unload_timeout_secs)

    async def _take_down(self, copy: Copy, patience: float, *, at_once: bool = False) -> None:
        """See `Copy.take_down`; and keep the books."""
        await copy.take_down(patience, at_once=at_once)
        self._copies.discard(copy)
        for model in copy.models:
            if self._watcher is not None and self._catalog.find(copy.name, model.signature.version) is None:
                self._watcher.model_unloaded(copy.name, model.signature.version)
        entry = self._entries.get(copy.name)
        if entry is not None and entry.serving is None:
            for version, state in entry.states.items():
                if state.state == "UNLOADING":
                    entry.states[version] = State("UNAVAILABLE", "unloaded")
        copy.gone.set()


async def _is_there(source: ModelSource, name: str) -> bool:
    try:
        return name in await in_thread(source.scan)
    except SetupError:  # no repository to be asked
        return False
