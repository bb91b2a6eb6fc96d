"""Each model's books: what Triton's statistics and metrics say, and what a departure saved and wasted.

One watcher keeps them, from the lives alone, so that statistics, metrics and the access log can't disagree. A life is
booked under the model that it names, when its request leaves RECEIVING, and stays there to its end, also if that model
is unloaded meanwhile. Lives of models that have no books (none is served under that name) are no model's; nothing that
a client makes up can open a book.

What is counted when. A request's success or failure is counted when its life ends; its compute when both its life and
its work have ended, in whichever order that was:

    life   RECEIVING ── QUEUED ── RUNNING ── SENDING ─┤ success or failure
    work                          begun ── infer_began ── infer_ended ── ended ─┤ compute, with the life's outcome

Success. COMPLETED and UNDELIVERED lives (the work was done; a policy wanted it finished without its client) are
successes, all others are failures, each with one of Triton's four reasons:

    CANCELED   the life was cancelled: its client left, or the server stopped it
    BACKEND    an instance had begun to run it, and the answer is an error
    REJECTED   none had, and the answer is 503: the queue was full, or it waited there for too long
    OTHER      none had, and it was refused for any other reason: it did not fit the model

Durations of the queue and of the parts of compute are, as in Triton, those of successes; the compute of a request that
ended otherwise is in `compute`, by outcome, where nothing is left out. There a cancelled request's compute is split at
the moment of the cancel: "cancelled" is what it had cost until then, "wasted" what went on afterwards.

A success of a model that is cached was a hit or a miss. Hits are what no run was for: the answer was there, or was
being computed for somebody else. As in Triton they are successes that waited so and so long, and neither inferences nor
executions. A miss is what a run was for; it is counted as any request, and as a miss besides. So there are as many
misses as runs that went well, and if the client that a run was begun for leaves, it is the next one's.

Executions are runs of the model, whatever became of them. Requests that ran together in a batch are one, counted with
the first of them under the batch's rows; each has a share of its compute, by its own rows. A runner that can't tell the
model's own code from what is around it has all of its work in `compute_infer`.

Bounds: response statistics are kept for the first `MOST_RESPONSES` responses of a request, batch statistics for
`MOST_BATCH_SIZES` sizes; what is beyond is counted with the last of them.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from trio_infer.lifecycle import CancelReason, Life, Outcome, Phase, Timing

__all__ = [
    "COMPUTE_OUTCOMES",
    "MOST_RESPONSES",
    "FailureReason",
    "Histogram",
    "ModelBooks",
    "ModelStatistics",
    "Quantiles",
    "Sum",
    "failure_reason",
]

MOST_RESPONSES: Final = 1024
MOST_BATCH_SIZES: Final = 128

COMPUTE_OUTCOMES: Final = (*(outcome.value for outcome in Outcome), "wasted")
"""What a second of compute may have been for: its request's outcome, or nobody any more."""

FIRST_RESPONSE_MS: Final = (100.0, 500.0, 2000.0, 5000.0)
"""Buckets for the time to the first response; Triton's."""

STOP_SECONDS: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Buckets for the time that work goes on after its cancel."""


class FailureReason(enum.Enum):
    """Why a request failed; the words are Triton's, which writes CANCELED with one l."""

    if not TYPE_CHECKING:  # as for `Phase`
        __hash__ = object.__hash__

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


def failure_reason(life: Life) -> FailureReason | None:
    """Why a life that has ended was a failure, as the head of this file says; None if it was a success."""
    if life.outcome in (Outcome.COMPLETED, Outcome.UNDELIVERED):
        return None
    if life.outcome is Outcome.CANCELLED:
        return FailureReason.CANCELED
    if life.timing is not None or Phase.RUNNING in life.entered:
        return FailureReason.BACKEND
    return FailureReason.REJECTED if life.status == 503 else FailureReason.OTHER


@attrs.define
class Sum:
    """How many, and how long together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += max(ns, 0)

    def as_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@attrs.define
class Histogram:
    """How many were at most each bound, as Prometheus counts: with those of the lower bounds.

    Args:
        bounds: ascending.
    """

    bounds: Sequence[float]
    counts: list[int] = attrs.field(init=False)
    total: float = attrs.field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bounds as Prometheus writes them, and counts; "+Inf" last."""
        seen = 0
        buckets = []
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        return buckets


@attrs.define
class Quantiles:
    """The latest durations, for quantiles over a window: at most `MOST`, none older than `WINDOW` seconds."""

    MOST = 1024
    WINDOW = 60.0

    total: Sum = attrs.field(init=False, factory=Sum)
    _latest: deque[tuple[float, int]] = attrs.field(init=False, factory=lambda: deque(maxlen=Quantiles.MOST))

    def add(self, ns: int) -> None:
        self.total.add(ns)
        self._latest.append((time.monotonic(), ns))

    def at(self, quantiles: Iterable[float]) -> Iterator[float]:
        """The duration, in ns, at each quantile; NaN if nothing came in the window, as Triton says."""
        since = time.monotonic() - self.WINDOW
        values = sorted(ns for when, ns in self._latest if when >= since)
        for quantile in quantiles:
            yield values[min(int(quantile * len(values)), len(values) - 1)] if values else float("nan")


@attrs.define
class _Compute:
    input: Sum = attrs.field(factory=Sum)
    infer: Sum = attrs.field(factory=Sum)
    output: Sum = attrs.field(factory=Sum)

    def add(self, parts: tuple[int, int, int]) -> None:
        self.input.add(parts[0])
        self.infer.add(parts[1])
        self.output.add(parts[2])

    def as_json(self) -> dict[str, Any]:
        return {
            "compute_input": self.input.as_json(),
            "compute_infer": self.infer.as_json(),
            "compute_output": self.output.as_json(),
        }


@attrs.define
class _Responses:
    compute_infer: Sum = attrs.field(factory=Sum)
    compute_output: Sum = attrs.field(factory=Sum)
    success: Sum = attrs.field(factory=Sum)
    fail: Sum = attrs.field(factory=Sum)
    empty_response: Sum = attrs.field(factory=Sum)
    cancel: Sum = attrs.field(factory=Sum)


@attrs.define(eq=False)
class ModelBooks:
    """What is known of one version of a model; counts begin when it is loaded.

    Attributes:
        model, version: whose.
        decoupled: whether it gives any number of responses, which are counted one by one.
        cached: whether its answers are kept in the response cache.
        load_seconds: how long loading took; None if not measured.
        pending: requests that wait in the queue, now.
        rows: of successes, added up.
        executions: runs that have ended.
        last_inference: when the last success ended, in ms since the epoch.
        success, failures, fail: requests that ended; `failures` by reason, `fail` their time together.
        cache_hit, cache_miss: successes that were, and the time that lookups and insertions took.
        queue, compute, batches, responses: see the head of this file.
        compute_by_outcome: ns by `COMPUTE_OUTCOMES`, of all work that has ended.
        cancelled: requests that were, by the phase they were struck in, and why.
        first_response, stopping: of decoupled models, ms to the first response; of all, seconds from cancel to end.
        latencies: of successes, by part; empty unless asked for.
    """

    model: str
    version: str
    decoupled: bool = False
    cached: bool = False
    load_seconds: float | None = None
    pending: int = 0
    rows: int = 0
    executions: int = 0
    last_inference: int = 0
    success: Sum = attrs.field(factory=Sum)
    fail: Sum = attrs.field(factory=Sum)
    failures: dict[FailureReason, int] = attrs.field(factory=lambda: dict.fromkeys(FailureReason, 0))
    cache_hit: Sum = attrs.field(factory=Sum)
    cache_miss: Sum = attrs.field(factory=Sum)
    queue: Sum = attrs.field(factory=Sum)
    compute: _Compute = attrs.field(factory=_Compute)
    batches: dict[int, _Compute] = attrs.field(factory=dict)
    responses: list[_Responses] = attrs.field(factory=list)
    compute_by_outcome: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(COMPUTE_OUTCOMES, 0))
    cancelled: Counter[tuple[Phase, CancelReason]] = attrs.field(factory=Counter)
    first_response: Histogram = attrs.field(factory=lambda: Histogram(FIRST_RESPONSE_MS))
    stopping: Histogram = attrs.field(factory=lambda: Histogram(STOP_SECONDS))
    latencies: dict[str, Quantiles] = attrs.field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The entry of `model_stats`, as Triton writes it."""
        return {
            "name": self.model,
            "version": self.version,
            "last_inference": self.last_inference,
            "inference_count": self.rows,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.as_json(),
                "fail": self.fail.as_json(),
                "queue": self.queue.as_json(),
                **self.compute.as_json(),
                "cache_hit": self.cache_hit.as_json(),
                "cache_miss": self.cache_miss.as_json(),
            },
            "response_stats": {
                str(index): {name: value.as_json() for name, value in attrs.asdict(each, recurse=False).items()}
                for index, each in enumerate(self.responses)
            },
            "batch_stats": [{"batch_size": size, **self.batches[size].as_json()} for size in sorted(self.batches)],
            "memory_usage": [],
        }

    # -- A life and its work ----------------------------------------------------------------------------------------

    def life_ended(self, life: Life) -> None:
        total = life.ended - life.entered[Phase.RECEIVING]
        reason = failure_reason(life)
        if reason is None:
            self.success.add(total)
            if life.look is None or not life.look.hit:
                self.rows += life.rows
            else:
                self._book_hit(life, total)
            if life.look is not None:
                (self.cache_hit if life.look.hit else self.cache_miss).add(life.look.ns)
            self.last_inference = time.time_ns() // 1_000_000
        else:
            self.fail.add(total)
            self.failures[reason] += 1
        if life.reason is not None and life.struck is not None:
            self.cancelled[life.struck, life.reason] += 1

    def _book_hit(self, life: Life, total: int) -> None:
        queued = _queued(life)
        self.queue.add(queued)
        if self.latencies:
            self.latencies["request"].add(total)
            self.latencies["queue"].add(queued)

    def work_and_life_ended(self, life: Life, timing: Timing) -> None:
        parts = _parts(timing)
        if timing.leads:
            self._book_execution(timing.batch_rows or life.rows, parts)
        assert life.outcome is not None
        worked = max(timing.ended - timing.begun, 0)
        after = min(max(timing.ended - life.struck_at, 0), worked) if life.struck_at else 0
        self.compute_by_outcome[life.outcome.value] += round((worked - after) * timing.share)
        self.compute_by_outcome["wasted"] += round(after * timing.share)
        if timing.ended > life.struck_at > 0:
            self.stopping.observe(after / 1e9)
        if self.decoupled:
            self._book_responses(life, timing)
        if failure_reason(life) is None:
            queued = _queued(life)
            self.queue.add(queued)
            self.compute.add(parts)
            if self.latencies:
                total = life.ended - life.entered[Phase.RECEIVING]
                for latency, ns in zip(self.latencies.values(), (total, queued, *parts), strict=True):
                    latency.add(ns)

    def _book_execution(self, rows: int, parts: tuple[int, int, int]) -> None:
        self.executions += 1
        batch = self.batches.get(rows)
        if batch is None:
            size = rows if len(self.batches) < MOST_BATCH_SIZES else max(self.batches)
            batch = self.batches.setdefault(size, _Compute())
        batch.add(parts)

    def _book_responses(self, life: Life, timing: Timing) -> None:
        since = timing.infer_began or timing.begun
        if timing.responses:
            self.first_response.observe((timing.responses[0] - life.entered[Phase.RECEIVING]) / 1e6)
        for index, when in enumerate(timing.responses):
            row = self._response(index)
            row.compute_infer.add(when - since)
            row.compute_output.add(0)
            row.success.add(when - since)
            since = when
        if failure_reason(life) is None and timing.responses:
            return  # the end of a stream that went well is nothing by itself
        row = self._response(len(timing.responses))
        rest = timing.ended - since
        if life.outcome is Outcome.CANCELLED:
            row.cancel.add(rest)
        elif failure_reason(life) is not None:
            row.compute_infer.add(rest)
            row.fail.add(rest)
        else:
            row.empty_response.add(rest)

    def _response(self, index: int) -> _Responses:
        index = min(index, MOST_RESPONSES - 1)
        while len(self.responses) <= index:
            self.responses.append(_Responses())
        return self.responses[index]


def _queued(life: Life) -> int:
    """How long it waited for an instance."""
    return life.entered[Phase.RUNNING] - life.entered[Phase.QUEUED] if Phase.QUEUED in life.entered else 0


def _parts(timing: Timing) -> tuple[int, int, int]:
    """The work's time before, in and after the model's own code."""
    began = timing.infer_began or timing.begun
    ended = timing.infer_ended or timing.ended
    return began - timing.begun, ended - began, timing.ended - ended


LATENCIES: Final = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class ModelStatistics:
    """Keeps the books of all models (a `LifeWatcher`).

    Args:
        quantiles: also keep the latest durations, for summaries.
    """

    def __init__(self, *, quantiles: bool = False) -> None:
        self._quantiles = quantiles
        self._books: dict[tuple[str, str], ModelBooks] = {}
        self._open: dict[Life, ModelBooks] = {}
        self.nobodys: Counter[tuple[Phase, CancelReason]] = Counter()
        """Cancelled requests that were not (or not yet) for a model."""

    def add(
        self,
        model: str,
        version: str,
        *,
        decoupled: bool = False,
        cached: bool = False,
        load_seconds: float | None = None,
    ) -> None:
        """A version of a model has been loaded: open its books, all zero, also if it had some before.

        Args:
            decoupled: whether it may give any number of responses.
            cached: whether its answers are kept in the response cache.
            load_seconds: how long loading took.
        """
        latencies = {name: Quantiles() for name in LATENCIES} if self._quantiles else {}
        self._books[model, version] = ModelBooks(model, version, decoupled, cached, load_seconds, latencies=latencies)

    def remove(self, model: str, version: str) -> None:
        """It has been unloaded: close its books."""
        self._books.pop((model, version), None)

    def __iter__(self) -> Iterator[ModelBooks]:
        """All books, in the order of names and versions."""
        yield from sorted(self._books.values(), key=lambda books: (books.model, len(books.version), books.version))

    def find(self, model: str, version: str | None = None) -> list[ModelBooks]:
        """The books of one model, of all its versions or the one asked for; empty if there are none."""
        return [books for books in self if books.model == model and version in (None, books.version)]

    # -- LifeWatcher ------------------------------------------------------------------------------------------------

    def life_moved(self, life: Life, left: Phase | None) -> None:
        if left is Phase.RECEIVING:
            books = self._books.get((life.model, life.version))
            if books is None:
                return
            self._open[life] = books
            if life.phase is Phase.QUEUED:
                books.pending += 1
        elif left is Phase.QUEUED and life in self._open:
            self._open[life].pending -= 1

    def life_ended(self, life: Life) -> None:
        books = self._open.get(life) or self._books.get((life.model, life.version))
        if books is None:
            if life.reason is not None and life.struck is not None:
                self.nobodys[life.struck, life.reason] += 1
            return
        if life.phase is Phase.QUEUED:
            books.pending -= 1
        books.life_ended(life)
        if life.timing is None:
            self._open.pop(life, None)
        elif life.timing.ended:
            self._open.pop(life, None)
            books.work_and_life_ended(life, life.timing)

    def work_ended(self, life: Life) -> None:
        if life.outcome is not None and life.timing is not None and (books := self._open.pop(life, None)) is not None:
            books.work_and_life_ended(life, life.timing)


def _number(value: float) -> str:
    """A bound as prometheus-cpp writes it."""
    return str(int(value)) if value == int(value) else repr(value)
