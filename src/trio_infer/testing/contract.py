"""Puts a runner through what its contract says, and tells what it doesn't keep.

Each check is an async function whose name is a sentence. It gets a runner of its own, freshly made, and raises
`AssertionError` with words for what was wrong. Before and after it the kit counts what must not be left: tasks,
threads, processes, descriptors, shared memory. A runner that hangs fails the check after `patience`; the kit goes on.

It runs on trio's own clock, since a runner's threads and processes know no other.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import trio

from trio_infer.models.host import Host, NoHost
from trio_infer.models.runner import Batches, Runner
from trio_infer.protocol.values import InferRequest
from trio_infer.testing.visit import Visit

__all__ = ["NAMES", "Check", "Conduct", "Report", "check_runner"]


@attrs.frozen(kw_only=True)
class Conduct:
    """Requests that make the runner's model do what is to be checked.

    Args:
        quick: is answered soon, each time with the same bytes.
        slow: goes on until it is cancelled, or for at least some seconds.
        deaf: ignores its cancel; it must end by itself, or the runner must be able to stop it. None if the model can't.
        crash: makes the model fail, or its process die; None if it can't.
        huge: is answered with many megabytes, or very many responses; None if the model can't.
        stops_within: seconds from a cancel of `slow` until its instance is free.
        deaf_within: the same for `deaf`.
        working: says whether the model's code is running, as the model itself tells it (by a flag, or a file). None if
            it doesn't tell; then only the runner's word is had for when it ends.
    """

    quick: InferRequest
    slow: InferRequest
    deaf: InferRequest | None = None
    crash: InferRequest | None = None
    huge: InferRequest | None = None
    stops_within: float = 1.0
    deaf_within: float = 10.0
    working: Callable[[], bool] | None = None


@attrs.frozen
class Check:
    """What one check came to.

    Args:
        name: a sentence.
        outcome: whether the runner keeps that.
        why: what was wrong, or why it can't be checked; "" if it passed.
    """

    name: str
    outcome: Literal["passed", "failed", "not applicable"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:14} {self.name}{self.why and f': {self.why}'}"


@attrs.frozen
class Report:
    """All checks, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """Those that the runner doesn't keep."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


async def check_runner(
    make: Callable[[], Runner],
    conduct: Conduct,
    *,
    host: Callable[[], Host] = NoHost,
    patience: float = 30.0,
    only: Sequence[str] = (),
) -> Report:
    """Put a runner through its contract.

    Args:
        make: a new runner, not loaded.
        conduct: what to ask of it.
        host: what the runner may ask of the server.
        patience: seconds after which a check has failed that has not ended.
        only: names of checks; none for all.

    Returns:
        what each check came to; those that can't be made with this runner are in it, too.

    Raises:
        AssertionError: it doesn't keep its contract; the message is the whole report.

    Cancellation: leaves as soon as the runner does.
    """
    checks = []
    with suppress(Exception):  # once before anything is counted: what libraries keep for good is not left behind
        with trio.move_on_after(patience):
            await a_request_is_answered_and_the_same_bytes_come_each_time(_Bench(make, conduct, host))
    for name, check in _CHECKS.items():
        if not only or name in only:
            checks.append(await _made(name, check, _Bench(make, conduct, host), patience))
    report = Report(tuple(checks))
    if report.failures:
        raise AssertionError(f"the runner does not keep its contract:\n{report}")
    return report


class _NotApplicable(Exception):
    """The check can't be made with this runner."""


async def _made(name: str, check: _Checking, bench: _Bench, patience: float) -> Check:
    before = _held()
    try:
        with trio.fail_after(patience):
            await check(bench)
            bench.look_at_instances()
            bench.visits.clear()  # and with them arrays in a runner's memory
            await _nothing_more(before)
    except _NotApplicable as reason:
        return Check(name, "not applicable", str(reason))
    except trio.TooSlowError:
        return Check(name, "failed", f"it has not ended after {patience:g} s")
    except Exception as error:
        return Check(name, "failed", "; ".join(_words(error)))
    return Check(name, "passed")


def _words(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [word for each in error.exceptions for word in _words(each)]
    return [str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"]


# -- What must not be left ---------------------------------------------------------------------------------------------


@attrs.frozen
class _Held:
    tasks: int
    threads: int
    processes: frozenset[str]
    descriptors: int
    shared: int


def _held() -> _Held:
    gc.collect()
    threads = sum(not thread.name.startswith("Trio thread") for thread in threading.enumerate())  # those wait for work
    proc = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    processes, descriptors, shared = "", 0, 0
    with suppress(OSError):  # other systems than Linux don't tell
        processes, descriptors = proc.read_text(), len(os.listdir("/proc/self/fd"))
        shared = len(os.listdir("/dev/shm"))  # noqa: S108 - it is only counted
    tasks = trio.lowlevel.current_statistics().tasks_living
    return _Held(tasks, threads, frozenset(processes.split()), descriptors, shared)


async def _nothing_more(before: _Held) -> None:
    """What ends behind the last call has a moment for it."""
    limit = time.monotonic() + 2
    while True:
        after = _held()
        more = [
            f"{what} ({getattr(before, what)} before, {getattr(after, what)} after)"
            for what in ("tasks", "threads", "descriptors", "shared")
            if getattr(after, what) > getattr(before, what)
        ]
        more += [f"process {number}" for number in sorted(after.processes - before.processes)]
        if not more:
            return
        if time.monotonic() > limit:
            raise AssertionError(f"something is left behind: {', '.join(more)}")
        await trio.sleep(0.01)


# -- What the checks are made with -------------------------------------------------------------------------------------


class _Bench:
    """One check's runner and its visits."""

    def __init__(self, make: Callable[[], Runner], conduct: Conduct, host: Callable[[], Host]) -> None:
        self.make = make
        self.conduct = conduct
        self.host = host
        self.visits: list[Visit] = []

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[Runner]:
        runner = self.make()
        await runner.load(self.host())
        try:
            yield runner
        finally:
            await runner.unload()

    def visit(self, runner: Runner, request: InferRequest, **options: Any) -> Visit:
        visit = Visit(runner, request, working=self.conduct.working, **options)
        self.visits.append(visit)
        return visit

    async def ask(self, runner: Runner, request: InferRequest) -> Visit:
        """One request, to its end."""
        visit = self.visit(runner, request)
        await visit.run()
        if visit.error is not None:
            raise AssertionError(f"a request failed: {type(visit.error).__name__}: {visit.error}")
        await self.free(visit, self.conduct.stops_within)
        return visit

    async def leave_while_running(self, runner: Runner, request: InferRequest, within: float) -> Visit:
        """A request whose client leaves when it has been running for a moment."""
        visit = self.visit(runner, request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit.run)
            await self.runs(visit)
            visit.leave()
            with trio.move_on_after(1) as limit:
                await visit.gone.wait()
            assert not limit.cancelled_caught, "the request's task is still in `run` a second after its cancel"
        await self.free(visit, within)
        return visit

    async def runs(self, visit: Visit) -> None:
        """Wait until it has begun, and a moment longer."""
        await visit.instance.started.wait()
        await trio.sleep(0.05)
        assert not visit.gone.is_set(), f"`slow` ended by itself, or failed: {visit.error!r}"

    async def free(self, visit: Visit, within: float) -> None:
        with trio.move_on_after(within) as limit:
            await visit.idle.wait()
        assert not limit.cancelled_caught, f"the instance is not free {within:g} s after the answer or the cancel"

    def look_at_instances(self) -> None:
        """What each request did with its instance, at the end of all."""
        for visit in self.visits:
            assert not visit.instance.faults, "; ".join(visit.instance.faults)
            assert visit.instance.begun == visit.instance.ended, "an instance was begun and never ended"
            assert not visit.instance.working

    def given(self, what: Literal["deaf", "crash", "huge"]) -> InferRequest:
        request: InferRequest | None = getattr(self.conduct, what)
        if request is None:
            raise _NotApplicable(f"no `{what}` request is given")
        return request


_Checking: TypeAlias = Callable[[_Bench], Awaitable[None]]


# -- The checks --------------------------------------------------------------------------------------------------------


async def a_request_is_answered_and_the_same_bytes_come_each_time(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        first, second = [await bench.ask(runner, bench.conduct.quick) for _ in range(2)]
        assert first.responses, "`quick` had no response"
        assert first.content() == second.content(), "`quick` was answered in two ways"


async def a_request_that_was_cancelled_before_it_ran_is_not_answered(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        visit = bench.visit(runner, bench.conduct.slow)
        visit.leave()
        await visit.run()
        await bench.free(visit, bench.conduct.stops_within)
        assert not visit.responses, "it was answered"
        await bench.ask(runner, bench.conduct.quick)


async def a_cancel_in_mid_run_is_left_at_once_and_frees_the_instance_in_time(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        before = await bench.ask(runner, bench.conduct.quick)
        for _ in range(3):
            await bench.leave_while_running(runner, bench.conduct.slow, bench.conduct.stops_within)
        after = await bench.ask(runner, bench.conduct.quick)
        assert before.content() == after.content(), "`quick` is answered in another way after cancels"


async def a_cancel_while_the_response_is_sent_is_left_and_frees_the_instance(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        visit = bench.visit(runner, bench.conduct.quick, on_send=Visit.leave)
        await visit.run()
        await bench.free(visit, bench.conduct.stops_within)
        assert not visit.responses, "a response was sent after the cancel"
        assert visit.error is None, f"it failed instead of being cancelled: {visit.error!r}"
        await bench.ask(runner, bench.conduct.quick)


async def a_second_cancel_changes_nothing(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        visit = await bench.leave_while_running(runner, bench.conduct.slow, bench.conduct.stops_within)
        visit.leave()
        visit.scope.cancel()
        await bench.ask(runner, bench.conduct.quick)
        assert visit.instance.ended == 1


async def a_cancel_during_loading_is_left_and_unload_undoes_what_was_begun(bench: _Bench) -> None:
    for moment in (0.0, 0.01, 0.1):
        runner = bench.make()
        with trio.move_on_after(moment):
            await runner.load(bench.host())
        await runner.unload()
    async with bench.loaded() as runner:
        await bench.ask(runner, bench.conduct.quick)


async def a_cancel_during_unloading_is_left_and_nothing_stays_behind(bench: _Bench) -> None:
    runner = bench.make()
    await runner.load(bench.host())
    await bench.ask(runner, bench.conduct.quick)
    with trio.move_on_after(0):
        await runner.unload()


async def a_crash_fails_its_request_with_words_and_the_next_one_is_answered(bench: _Bench) -> None:
    request = bench.given("crash")
    async with bench.loaded() as runner:
        for _ in range(2):
            visit = bench.visit(runner, request)
            await visit.run()
            assert visit.error is not None, "`crash` did not fail"
            assert str(visit.error), f"its error says nothing: {visit.error!r}"
            await bench.free(visit, bench.conduct.stops_within)
            await bench.ask(runner, bench.conduct.quick)


async def a_model_that_ignores_its_cancel_keeps_its_instance_until_it_has_really_ended(bench: _Bench) -> None:
    request = bench.given("deaf")
    async with bench.loaded() as runner:
        await bench.leave_while_running(runner, request, bench.conduct.deaf_within)
        await bench.ask(runner, bench.conduct.quick)


async def a_huge_answer_arrives_whole_and_one_that_is_cancelled_leaves_nothing(bench: _Bench) -> None:
    request = bench.given("huge")
    async with bench.loaded() as runner:
        first, second = [await bench.ask(runner, request) for _ in range(2)]
        assert first.content() == second.content(), "`huge` was answered in two ways"
        visit = bench.visit(runner, request, on_send=Visit.leave)
        await visit.run()
        await bench.free(visit, bench.conduct.stops_within)
        third = await bench.ask(runner, request)
        assert first.content() == third.content(), "`huge` is answered in another way after a cancel"


async def a_batch_goes_on_for_who_stays_and_stops_with_the_last_to_leave(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        if not isinstance(runner, Batches) or not runner.joins or not runner.signature.max_batch_size:
            raise _NotApplicable("the runner doesn't join requests")
        alone = await bench.ask(runner, bench.conduct.quick)
        for leavers in (0, 1):
            visits = [bench.visit(runner, bench.conduct.quick) for _ in range(2)]
            attends = runner.begin_batch([(visit.instance, visit.request) for visit in visits])
            for visit in visits[:leavers]:
                visit.leave()
            async with trio.open_nursery() as nursery:
                for visit, attend in zip(visits, attends, strict=True):
                    nursery.start_soon(visit.run, attend)
            for visit in visits[leavers:]:
                assert visit.error is None, f"it failed: {visit.error!r}"
                assert len(visit.responses) == len(alone.responses), "who stayed was not answered"
        visits = [bench.visit(runner, bench.conduct.slow) for _ in range(2)]
        attends = runner.begin_batch([(visit.instance, visit.request) for visit in visits])
        async with trio.open_nursery() as nursery:
            for visit, attend in zip(visits, attends, strict=True):
                nursery.start_soon(visit.run, attend)
            await bench.runs(visits[0])
            visits[0].leave()
            await trio.sleep(0.02)
            assert visits[1].instance.working, "the batch stopped although one of its requests is still there"
            visits[1].leave()
        for visit in visits:
            await bench.free(visit, bench.conduct.stops_within)


async def unloading_waits_for_work_that_goes_on_and_no_instance_outlives_it(bench: _Bench) -> None:
    runner = bench.make()
    await runner.load(bench.host())
    visit = bench.visit(runner, bench.conduct.slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.run)
        await bench.runs(visit)
        visit.leave()
    await runner.unload()
    assert not visit.instance.working, "`unload` returned while work went on in an instance"


async def it_says_that_it_is_ready_when_it_is_loaded(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        assert await runner.ready() is True, "`ready` doesn't say True of a runner that was just loaded"


async def killing_ends_what_runs_or_says_that_it_cannot(bench: _Bench) -> None:
    async with bench.loaded() as runner:
        visit = bench.visit(runner, bench.conduct.slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visit.run)
            await bench.runs(visit)
            if runner.kill():
                await bench.free(visit, 5)
                await visit.gone.wait()
                assert visit.error is not None, "its request was killed, and didn't fail"
            else:
                visit.leave()
        await bench.free(visit, bench.conduct.stops_within)


_CHECKS: Final[dict[str, _Checking]] = {
    check.__name__.replace("_", " "): check
    for check in (
        a_request_is_answered_and_the_same_bytes_come_each_time,
        a_request_that_was_cancelled_before_it_ran_is_not_answered,
        a_cancel_in_mid_run_is_left_at_once_and_frees_the_instance_in_time,
        a_cancel_while_the_response_is_sent_is_left_and_frees_the_instance,
        a_second_cancel_changes_nothing,
        a_cancel_during_loading_is_left_and_unload_undoes_what_was_begun,
        a_cancel_during_unloading_is_left_and_nothing_stays_behind,
        a_crash_fails_its_request_with_words_and_the_next_one_is_answered,
        a_model_that_ignores_its_cancel_keeps_its_instance_until_it_has_really_ended,
        a_huge_answer_arrives_whole_and_one_that_is_cancelled_leaves_nothing,
        a_batch_goes_on_for_who_stays_and_stops_with_the_last_to_leave,
        unloading_waits_for_work_that_goes_on_and_no_instance_outlives_it,
        it_says_that_it_is_ready_when_it_is_loaded,
        killing_ends_what_runs_or_says_that_it_cannot,
    )
}

NAMES: Final[tuple[str, ...]] = tuple(_CHECKS)
"""Of all checks."""
