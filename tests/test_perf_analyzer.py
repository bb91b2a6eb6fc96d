"""Triton's load generator, unchanged, against the real command: it reads metadata, configuration and statistics, and
reports what the server did."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import Command
from support import needs

pytestmark = needs("perf_analyzer")

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 16 ] }
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())]
            )
            for request in requests
        ]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    root = tmp_path_factory.mktemp("repository")
    (root / "echo" / "1").mkdir(parents=True)
    (root / "echo" / "config.pbtxt").write_text(CONFIG)
    (root / "echo" / "1" / "model.py").write_text(MODEL)
    command = Command.start(str(root), "--allow-client-shm=true")
    try:
        command.ready()
        yield command
    finally:
        command.clean_up()


def analyze(server: Command, report: Path, *words: str) -> dict[str, str]:
    """The first row of its report: one level of concurrency."""
    done = subprocess.run(
        [
            "perf_analyzer",
            *("-m", "echo", "-u", f"127.0.0.1:{server.port}", "-i", "http", "-b", "2"),
            *("--measurement-mode", "count_windows", "--measurement-request-count", "60"),
            *("--measurement-interval", "300", "--stability-percentage", "999", "-f", str(report)),
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"error|fail", done.stderr, re.IGNORECASE), done.stderr
    (row, *_) = csv.DictReader(report.read_text().splitlines())
    return row


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--input-tensor-format", "json", "--output-tensor-format", "json"),
        ("--shared-memory", "system", "--output-shared-memory-size", "128"),
        ("--async", "--concurrency-range", "4"),
    ],
    ids=["binary", "json", "shared memory", "async"],
)
def test_it_settles_and_finds_the_statistics_it_needs(server: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    row = analyze(server, tmp_path / "report.csv", *words)
    assert float(row["Inferences/Second"]) > 20
    assert float(row["Server Compute Infer"]) > 0, "microseconds, from /v2/models/echo/stats"
