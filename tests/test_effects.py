"""The effect table, row by row: what stops when one client leaves, is late, or is cancelled, and what goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from effect_rows import (
    ROWS,
    InBatch,
    InBLS,
    InEnsemble,
    InSequence,
    LastOfBatch,
    Queued,
    Receiving,
    Row,
    Sending,
    Streaming,
    TokenLoop,
    rest,
    staged,
    told,
)
from support import Client, post

CLOSER_LOOKS: dict[type[Row], tuple[str, str]] = {
    Receiving: ("test_departures", "test_receiving_a_body_the_read_stops_and_the_model_is_never_entered"),
    Queued: ("test_departures", "test_leaving_the_queue_lets_the_next_one_move_up"),
    InBatch: (
        "scheduling.test_batching",
        "test_one_that_leaves_a_running_batch_is_skipped_and_the_others_are_untouched",
    ),
    LastOfBatch: ("scheduling.test_batching", "test_the_last_one_to_leave_stops_the_batch"),
    InSequence: ("scheduling.test_sequences", "test_what_is_in_front_of_a_cancelled_request_goes_on"),
    TokenLoop: ("models.test_token_model", "test_the_effect_of_a_departure_in_each_phase"),
    InEnsemble: ("models.test_ensembles", "test_leaving_stops_parallel_branches_and_what_is_nested_in_them"),
    InBLS: ("models.test_triton_bls", "test_the_inner_request_is_cancelled_with_the_outer_one"),
    Row: ("test_departures", "test_running_it_is_cancelled_at_its_next_checkpoint"),
    Streaming: ("test_departures", "test_streaming_the_generator_is_closed_in_the_task_that_iterates_it"),
    Sending: ("test_deadlines", "test_an_answer_that_is_half_sent_is_cut_off"),
}
"""For each row the test that looks closest at what happens there."""


def test_each_row_has_a_test_that_looks_closer() -> None:
    assert set(CLOSER_LOOKS) == set(ROWS)
    for module, name in CLOSER_LOOKS.values():
        file = Path(__file__).parent / f"{module.replace('.', '/')}.py"
        assert f"def {name}(" in file.read_text()


async def check_told(row: Row, leaver: Client, status: int, words: str) -> None:
    """One that is still there was told."""
    if row.cut:
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            while True:
                await leaver._exactly(2**16)
    elif row.phase == "streaming":
        assert told(await rest(leaver))[-1]["error"].startswith(f"{words} while streaming")
    else:
        answer = await leaver.answer()
        assert (answer.status, answer.json["error"].startswith(f"{words} while {row.phase}")) == (status, True)


REASONS = {"deadline": "deadline passed", "cancel": "cancel requested"}
TOLD = {"deadline": (504, "deadline passed"), "cancel": (499, "cancelled by request")}


async def play(row: Row, way: str) -> None:
    """Bring everybody to their places, end one request in that way, and look at everything that must come of it."""
    headers = ["Inference-Timeout-Ms: 500"] if way == "deadline" else []
    async with staged(row) as stage:
        served = stage.served
        leaver = await row.arrange(stage, headers)
        expected = served.cancelled()
        for struck, count in {(REASONS.get(way, "client disconnected"), row.phase): 1, **row.also}.items():
            expected[struck] = expected.get(struck, 0) + count
        began = trio.current_time()
        if way == "cancel":
            canceller = await stage.asking(post(row.model, "cancel", {"id": "leaver"}))
            assert (await canceller.answer()).json == {"cancelled": 1}
            await stage.let_go(canceller)
        elif way != "deadline":
            await getattr(leaver, way)()
        if row.cut:
            await stage.until(lambda: served.cancelled() == expected)
        if way in TOLD:
            await check_told(row, leaver, *TOLD[way])
        await stage.until(row.stopped)
        if row.memory:
            assert trio.current_time() - began == pytest.approx(0.5 if way == "deadline" else 0), "at once"
        await leaver.close()
        row.go()
        await row.check_others(stage)
        await stage.until(lambda: served.cancelled() == expected)
        await stage.until(lambda: stage.queue(row.model).running == stage.queue(row.model).abandoned == 0)
        probe = await stage.asking(row.probe())
        assert (await probe.answer()).status == 200, "the slot is free"
        await stage.let_go(probe)
        lines = await stage.metrics()
        for (why, phase), count in expected.items():
            line = f'trio_infer_cancelled_total{{model="{row.model}",phase="{phase}",reason="{why}"}} {count}'
            assert line in lines
        failures = sum(expected.values())
        assert f'nv_inference_request_failure{{model="{row.model}",reason="CANCELED",version="1"}} {failures}' in lines


def ways(*names: str, real: bool) -> pytest.MarkDecorator:
    """Each row, ended in each way that there is for it."""
    rows = [row for row in ROWS if real or not row.real]
    return pytest.mark.parametrize(
        ("row", "way"), [(row, way) for row in rows for way in names if row.known or way != "cancel"]
    )


@ways("close", "deadline", "cancel", real=False)
async def test_in_memory_what_is_to_stop_does_so_at_once_and_nobody_else_notices(
    row: type[Row], way: str, tmp_path: Path, autojump_clock: Any
) -> None:
    await play(row(None, tmp_path, memory=True), way)


@ways("close", "reset", "cancel", real=True)
async def test_over_sockets_what_is_to_stop_does_so_and_nobody_else_notices(
    row: type[Row], way: str, tmp_path: Path
) -> None:
    await play(row(None, tmp_path), way)


@pytest.mark.parametrize("row", [row for row in ROWS if row.known and not row.cut])
async def test_work_that_is_to_be_finished_goes_on_and_a_drain_waits_for_it(row: type[Row], tmp_path: Path) -> None:
    finishing = row("finish", tmp_path)
    async with staged(finishing) as stage:
        leaver = await finishing.arrange(stage, ())
        await leaver.reset()
        stage.served.server.drain()
        for _ in range(50):  # not until all is quiet: a token loop never is
            await trio.lowlevel.checkpoint()
        assert not stage.served.finished.is_set()
        assert stage.served.cancelled() == {}
        finishing.go()
        await finishing.check_others(stage)
        with trio.fail_after(10):
            await stage.served.finished.wait()
        assert stage.served.cancelled() == {}
        assert stage.served.outcomes()["undelivered"] == finishing.held
