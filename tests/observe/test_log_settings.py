"""What a line of the log looks like, and what is logged."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_infer.errors import InferError, SetupError
from trio_infer.observe.log_settings import LineFormatter, LogSettings

NAMES = ("trio_infer.wire", "trio_infer.model.m", "a.library")
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
ALL = set(LEVELS)


@pytest.fixture
def levels_restored() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("trio_infer")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def record(level: int, message: str, *args: Any) -> logging.LogRecord:
    made = logging.LogRecord("trio_infer", level, "/models/m/1/model.py", 68, message, args, None)
    made.created, made.process = 1796068915.532575, 341
    return made


def test_a_line_has_tritons_form() -> None:
    formatter = LineFormatter()
    assert formatter.format(record(logging.INFO, "%s after", "1 ms")) == (
        'I1130 20:01:55.532575 341 model.py:68] "1 ms after"'
    )
    letters = [formatter.format(record(level, ""))[0] for level in LEVELS]
    assert letters == ["I", "I", "W", "E", "E"]
    assert LineFormatter("ISO8601").format(record(logging.WARNING, "x")) == (
        '2026-11-30T20:01:55Z W 341 model.py:68] "x"'
    )


@given(st.text())
def test_no_message_can_write_a_line_of_its_own(message: str) -> None:
    line = LineFormatter().format(record(logging.INFO, "%s", message))
    assert "\n" not in line
    assert "\r" not in line
    assert json.loads(line.partition("] ")[2]) == message


def test_a_traceback_follows_its_line() -> None:
    made = record(logging.ERROR, "failed")
    try:
        raise ValueError("boom")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    first, *rest = LineFormatter().format(made).splitlines()
    assert first.endswith('"failed"')
    assert rest[-1] == "ValueError: boom"


@pytest.mark.usefixtures("levels_restored")
@pytest.mark.parametrize(
    ("changes", "passing"),
    [
        ({}, ALL - {logging.DEBUG}),
        ({"log_info": False}, {logging.WARNING, logging.ERROR, logging.CRITICAL}),
        ({"log_warning": False}, {logging.INFO, logging.ERROR, logging.CRITICAL}),
        ({"log_error": False, "log_info": False}, {logging.WARNING}),
        ({"log_error": False, "log_info": False, "log_warning": False}, set()),
        (
            {"log_verbose_level": 1, "log_info": False},
            {logging.DEBUG, logging.WARNING, logging.ERROR, logging.CRITICAL},
        ),
    ],
)
def test_each_severity_is_on_or_off_by_itself(tmp_path: Path, changes: dict[str, Any], passing: set[int]) -> None:
    file = tmp_path / "log"
    settings = LogSettings(log_file=str(file))
    settings.install()
    try:
        settings.update(**changes)
        for name in NAMES[:2]:
            for level in LEVELS:
                logging.getLogger(name).log(level, "%d from %s", level, name)
    finally:
        settings.uninstall()
    seen = re.findall(r'"(\d+) from (.+)"', file.read_text())
    assert seen == [(str(level), name) for name in NAMES[:2] for level in LEVELS if level in passing]


@pytest.mark.usefixtures("levels_restored")
def test_libraries_are_verbose_on_level_2_only(tmp_path: Path) -> None:
    file = tmp_path / "log"
    settings = LogSettings(log_file=str(file), log_verbose_level=1)
    settings.install()
    try:
        logging.getLogger(NAMES[2]).debug("quiet")
        settings.update(log_verbose_level=2)
        logging.getLogger(NAMES[2]).debug("loud")
        file.rename(tmp_path / "log.1")
        logging.getLogger(NAMES[2]).warning("in a new file")
    finally:
        settings.uninstall()
    assert "quiet" not in (tmp_path / "log.1").read_text()
    assert "loud" in (tmp_path / "log.1").read_text()
    assert "in a new file" in file.read_text()


def test_a_file_that_can_not_be_written_and_an_unknown_format_are_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--log-file: can't write .*: No such file"):
        LogSettings(log_file=str(tmp_path / "no" / "log")).install()
    settings = LogSettings()
    with pytest.raises(InferError, match=r"^invalid argument for --log_format, got: x") as refused:
        settings.update(log_format="x", log_info=False)
    assert refused.value.status == 503
    assert settings == LogSettings()
