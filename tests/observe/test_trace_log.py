"""Trace files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trio_infer.lifecycle import CancelReason, Life, Phase
from trio_infer.models.runner import Instance
from trio_infer.observe.trace_log import TraceLog
from trio_infer.observe.trace_settings import TraceSettings


def settings(file: Path, **changes: Any) -> TraceSettings:
    start = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_file": str(file)}
    return TraceSettings(start | changes)


def request(log: TraceLog, *, model: str = "m", cancel: bool = False, run: bool = True) -> None:
    life = Life([log])
    life.model, life.version, life.request_id = model, "1", 'id "1"'
    if run:
        life.advance(Phase.QUEUED)
        life.advance(Phase.RUNNING)
        instance = Instance(0, life)
        instance.begin()
        if cancel:
            life.cancel(CancelReason.DISCONNECTED)
            life.end()
            instance.end()
            return
        instance.end()
    life.advance(Phase.SENDING)
    life.status = 200
    life.end()


def names(record: dict[str, Any]) -> list[str]:
    return [stamp["name"] for stamp in record["timestamps"]]


def test_a_file_is_whole_json_after_each_trace_and_says_when_a_request_was_where(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    log = TraceLog(settings(file))
    request(log)
    about, record = json.loads(file.read_bytes())
    assert about == {"id": 1, "model_name": "m", "model_version": 1, "request_id": 'id "1"', "outcome": "completed"}
    assert names(record) == [
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "REQUEST_END",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    ]
    times = [stamp["ns"] for stamp in record["timestamps"]]
    assert times == sorted(times)
    request(log, cancel=True)
    request(log, run=False)
    records = json.loads(file.read_bytes())
    assert [each["outcome"] for each in records[::2]] == ["completed", "cancelled", "completed"]
    assert "CANCELLED" in names(records[3])
    assert "COMPUTE_START" not in names(records[5])
    log.close()


def test_rate_and_count_say_how_many(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    chosen = settings(file, trace_rate="3", trace_count="2")
    log = TraceLog(chosen)
    for _ in range(30):
        request(log)
    assert len(json.loads(file.read_bytes())) == 2 * 2
    assert chosen.of()["trace_count"] == "0"
    chosen.update({"trace_count": "1", "trace_rate": "1"}, "mine")
    for model in ("mine", "mine", "m", ""):
        request(log, model=model)
    assert [each["model_name"] for each in json.loads(file.read_bytes())[::2]] == ["m", "m", "mine"]
    assert chosen.of("mine")["trace_count"] == "0"
    log.close()


def test_log_frequency_begins_a_file_after_so_many(tmp_path: Path) -> None:
    log = TraceLog(settings(tmp_path / "trace.json", log_frequency="2"))
    for _ in range(5):
        request(log)
    log.close()
    log.close()
    written = sorted(file.name for file in tmp_path.iterdir())
    assert written == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert [len(json.loads((tmp_path / name).read_bytes())) for name in written] == [4, 4, 2]


@pytest.mark.parametrize("changes", [{"trace_level": ["OFF"]}, {"trace_level": ["TENSORS"]}, {"trace_rate": "0"}])
def test_nothing_is_traced_if_it_is_off(tmp_path: Path, changes: dict[str, Any]) -> None:
    log = TraceLog(settings(tmp_path / "trace.json", **changes))
    request(log)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_not_be_written_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TraceLog(settings(tmp_path / "nowhere" / "trace.json"))
    with caplog.at_level(logging.WARNING):
        request(log)
        request(log)
    (warning,) = caplog.messages
    assert "No such file" in warning
