"""Triton's own command lines start this server: each of its options is taken, in both spellings, by a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import PATIENCE, Command
from support import needs
from trio_infer.cli import main
from trio_infer.options import Options

LINE = """
--model-repository=REPOSITORY --model-store=REPOSITORY --http-port=0 --http-address=127.0.0.1 --reuse-http-port=true
--http-thread-count=8 --http-max-input-size=67108864 --http-header-forward-pattern=x-.*
--http-restricted-api=model-repository:key=value --allow-http=true --allow-grpc=true --grpc-port=8001
--grpc-address=127.0.0.1 --reuse-grpc-port=false --grpc-infer-allocation-pool-size=8 --grpc-use-ssl=false
--grpc-use-ssl-mutual=false --grpc-server-cert=none --grpc-server-key=none --grpc-root-cert=none
--grpc-infer-response-compression-level=none --grpc-keepalive-time=7200000 --grpc-keepalive-timeout=20000
--grpc-keepalive-permit-without-calls=false --grpc-http2-max-pings-without-data=2
--grpc-http2-min-recv-ping-interval-without-data=300000 --grpc-http2-max-ping-strikes=2 --grpc-max-connection-age=0
--grpc-max-connection-age-grace=0 --grpc-restricted-protocol=health:key=value --grpc-header-forward-pattern=x-.*
--allow-metrics=true --metrics-port=0 --metrics-address=127.0.0.1 --metrics-config=summary_latencies=false
--metrics-interval-ms=2000 --allow-gpu-metrics=true --allow-cpu-metrics=true --model-control-mode=none
--load-model=mine --repository-poll-secs=15 --model-load-thread-count=4 --model-load-retry-count=0
--disable-auto-complete-config=false --strict-model-config=false --exit-on-error=true --exit-timeout-secs=30
--strict-readiness=true --id=triton --log-verbose=0 --log-info=true --log-warning=true --log-error=true
--log-format=default --log-file=LOG --trace-config=level=OFF --trace-file=TRACE --trace-level=OFF --trace-rate=1000
--trace-count=-1 --log-frequency=0 --allow-client-shm=true --backend-directory=none --backend-config=python,x=1
--cache-config=local,size=1048576 --cache-directory=none --repoagent-directory=none --rate-limit=off
--rate-limit-resource=R1:4:0 --pinned-memory-pool-byte-size=268435456 --cuda-memory-pool-byte-size=0:67108864
--cuda-virtual-address-size=0:0 --min-supported-compute-capability=6.0 --host-policy=0,numa-node=0
--buffer-manager-thread-count=0 --response-cache-byte-size=0 --model-load-gpu-limit=0:0.9 --enable-peer-access=true
--model-namespacing=false --allow-sagemaker=false --sagemaker-port=8080 --sagemaker-safe-port-range=1-65535
--sagemaker-thread-count=8 --allow-vertex-ai=false --vertex-ai-port=8080 --vertex-ai-thread-count=8
--vertex-ai-default-model=mine
"""
"""One of each of Triton's options, with a value that Triton takes."""

OPTIONS = LINE.split()

TWICE = ["--model-store"]
"""Second names of an option, which the command line as a whole can't have beside the first."""

ALONE = {"--load-model": "--model-control-mode=explicit", "--repository-poll-secs": "--model-control-mode=poll"}
"""What an option makes no sense without."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "mine" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "trio_infer"\n', encoding="utf-8")
    code = (
        "import trio_infer\n\n\nclass It(trio_infer.Model):\n    async def infer(self, request):\n        return {}\n"
    )
    (version / "model.py").write_text(code, encoding="utf-8")
    return tmp_path


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.clean_up()


def words(repository: Path, *, spaced: bool) -> list[str]:
    """The options, with what stands for a place put in."""
    places = {"REPOSITORY": "models", "LOG": "log.txt", "TRACE": "trace.json"}
    given = []
    for option in OPTIONS:
        name, _, value = option.partition("=")
        if name in TWICE or name in ALONE:
            continue
        value = str(repository / places[value]) if value in places else value
        given += [name, value] if spaced else [f"{name}={value}"]
    return given


@pytest.mark.parametrize("spaced", [False, True])
def test_a_command_line_with_every_option_of_triton_starts_the_server(
    repository: Path, commands: list[Command], spaced: bool
) -> None:
    command = Command.start(*words(repository, spaced=spaced))
    commands.append(command)
    assert "(models: mine)" in command.ready()
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0


def test_each_option_of_triton_means_the_same_in_both_spellings(
    monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    seen: list[Options] = []
    monkeypatch.setattr("trio_infer.app.run", seen.append)
    for spaced in (False, True):
        assert main(["serve", *words(repository, spaced=spaced)]) == 0
    one, other = seen
    assert one == other
    assert one.model_repository == (repository / "models",)


@pytest.mark.parametrize("option", [*TWICE, *ALONE])
def test_what_the_whole_line_leaves_out_is_an_option_too(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr("trio_infer.app.run", lambda options: None)
    given = [other for other in OPTIONS if other.partition("=")[0] == option]
    assert main(["serve", *given, *([ALONE[option]] if given and option in ALONE else [])]) == 0


def test_what_has_no_effect_is_warned_of_once_each_and_grpc_in_silence(
    repository: Path, commands: list[Command]
) -> None:
    command = Command.start(
        str(repository / "models"),
        "--allow-grpc=true",
        "--grpc-port=8001",
        "--backend-config=python,x=1",
        "--backend-config",
        "python,y=2",
        "--pinned-memory-pool-byte-size=1",
    )
    commands.append(command)
    command.ready()
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0
    warnings = [line.partition('] "')[2].removesuffix('"') for line in command.log if line.startswith("W")]
    assert warnings == [
        "--backend-config has no effect: backends have no settings here",
        "--pinned-memory-pool-byte-size has no effect: there is no pinned memory",
    ]


def test_an_option_that_triton_does_not_know_is_refused_with_exit_code_1() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trio_infer", "serve", "--fluxcompensator=1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "trio-infer: unknown option --fluxcompensator; see: trio-infer serve --help\n"


@needs("curl")
def test_the_fronts_for_cloud_platforms_open_as_their_environment_says(
    repository: Path, commands: list[Command]
) -> None:
    command = Command.start(
        "--allow-sagemaker",
        "--sagemaker-port=0",
        environment={"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "0", "AIP_STORAGE_URI": str(repository / "models")},
    )
    commands.append(command)
    line = command.ready()
    assert line.count("http://127.0.0.1:") == 2
    said = [word for word in line.split() if word.startswith("http://")]
    for url, path in zip(said, ("/ping", "/health"), strict=True):
        done = subprocess.run(
            ["curl", "-s", "-o", os.devnull, "-w", "%{json}", url + path], capture_output=True, check=True
        )
        assert json.loads(done.stdout)["http_code"] == 200
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0
