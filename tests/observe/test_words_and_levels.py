"""Trace settings and what `--metrics-config` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.errors import InferError, SetupError
from trio_infer.observe.machine import Machine
from trio_infer.observe.metrics_policy import MetricsPolicy
from trio_infer.observe.trace_settings import DEFAULTS, TraceOptions, TraceSettings


def test_null_clears_to_the_next_level_up() -> None:
    settings = TraceSettings({"trace_rate": "7", "trace_file": "t.json"})
    settings.update({"trace_rate": "8", "trace_level": ["TIMESTAMPS"]})
    settings.update({"trace_rate": "9"}, "m")
    assert settings.of("m")["trace_rate"] == "9"
    assert settings.of("m")["trace_level"] == ["TIMESTAMPS"]
    assert settings.of("other")["trace_rate"] == "8"
    settings.update({"trace_rate": None}, "m")
    assert settings.of("m")["trace_rate"] == "8"
    settings.update({"trace_rate": None, "trace_level": None})
    assert settings.of("m") == settings.of() == {**DEFAULTS, "trace_rate": "7", "trace_file": "t.json"}
    assert list(settings.of()) == list(DEFAULTS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trace_file": "x"}, "trace file location can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": []}, "Unable to parse 'trace_level'"),
        ({"trace_level": ["LOUD"]}, "Unable to parse 'trace_level'.*got: LOUD"),
        ({"trace_level": 3}, "Unable to parse 'trace_level'"),
        ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": True}, "Unable to parse 'trace_rate', got: True"),
        ({"trace_rate": "-1"}, r"'trace_rate', value is out of range \[ 0, 4294967295 \], got: -1"),
        ({"trace_rate": "9" * 5000}, "'trace_rate', value is out of range"),
        ({"trace_count": "-2"}, r"Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": str(2**31)}, r"'trace_count', value is out of range \[ -1, 2147483647 \]"),
        ({"log_frequency": ["1", "2"]}, "Unable to parse 'log_frequency'"),
        ({"volume": "11"}, "unknown trace setting 'volume'"),
    ],
)
def test_what_is_no_setting_is_refused_and_changes_nothing(changes: dict[str, Any], words: str) -> None:
    settings = TraceSettings()
    with pytest.raises(InferError, match=words):
        settings.update({"log_frequency": "5", **changes})
    assert settings.of() == DEFAULTS


def test_strings_arrays_of_strings_and_numbers_are_understood() -> None:
    settings = TraceSettings()
    settings.update({"trace_level": "MAX", "trace_rate": ["5"], "trace_count": 3, "log_frequency": " 4 "})
    assert [settings.of()[name] for name in ("trace_level", "trace_rate", "trace_count", "log_frequency")] == [
        ["TIMESTAMPS"],
        "5",
        "3",
        "4",
    ]


@given(st.dictionaries(st.sampled_from([*DEFAULTS, "x"]), st.none() | st.text() | st.integers() | st.lists(st.text())))
def test_whatever_is_sent_the_settings_keep_their_form(changes: dict[str, Any]) -> None:
    settings = TraceSettings()
    try:
        settings.update(changes, "m")
    except InferError:
        assert settings.of("m") == DEFAULTS
    assert list(settings.of("m")) == list(DEFAULTS)
    assert settings.of() == DEFAULTS


def test_the_commands_words_for_tracing() -> None:
    options = TraceOptions(
        trace_config=("level=TIMESTAMPS", "triton,file=t.json", "rate=10", "mode=triton", "level=TENSORS"),
        trace_rate="5",
        trace_count="6",
        log_frequency="2",
    )
    assert options.settings() == {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_file": "t.json",
        "trace_rate": "10",
        "trace_count": "6",
        "log_frequency": "2",
    }
    for word in ("opentelemetry,url=x", "mode=opentelemetry", "rate", "rate=x", "loud=1"):
        with pytest.raises(SetupError, match="--trace-config"):
            TraceOptions(trace_config=(word,)).settings()
    with pytest.raises(SetupError, match="--trace-rate: Unable to parse 'trace_rate', got: x"):
        TraceOptions(trace_rate="x").settings()


def test_the_commands_words_for_metrics() -> None:
    words = ["summary_latencies=true", "counter_latencies=FALSE", "summary_quantiles=0.5:0.05,0.9:0.01"]
    assert MetricsPolicy.read(words, cpu=False) == MetricsPolicy(
        summary_latencies=True, counter_latencies=False, summary_quantiles=((0.5, 0.05), (0.9, 0.01)), cpu=False
    )
    assert MetricsPolicy.read([]) == MetricsPolicy()
    for word in ("x=true", "summary_latencies", "summary_latencies=maybe", "summary_quantiles=0.5"):
        with pytest.raises(SetupError, match="--metrics-config"):
            MetricsPolicy.read([word])
    for quantiles in ("2:0", "x:y", ",".join(["0.5:0.1"] * 50)):
        with pytest.raises(SetupError, match="summary_quantiles"):
            MetricsPolicy.read([f"summary_quantiles={quantiles}"])


def test_the_machine_is_seen_through_proc(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:  40 kB\n")
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0 0 0\ncpu0 1 1 1\n")
    machine = Machine(0, tmp_path)
    (tmp_path / "stat").write_text("cpu  20 0 20 140 20 0 0 0 0 0\n")
    assert machine.look() == {
        "nv_cpu_utilization": 0.2,
        "nv_cpu_memory_total_bytes": 102400,
        "nv_cpu_memory_used_bytes": 61440,
    }
    (tmp_path / "meminfo").write_text("something else")
    assert machine.look() == Machine(0, tmp_path / "nowhere").look() == {}
