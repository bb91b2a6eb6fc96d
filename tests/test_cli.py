"""The command as an operator meets it: real processes, their lines, signals and exit codes.

Nothing here sleeps: lines of the processes are awaited, with a time limit.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from command import PATIENCE, Command
from support import needs
from trio_infer.cli import main


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts commands, and sees to it that none is left."""
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command.start(*words))
        return started[-1]

    yield start
    for command in started:
        command.clean_up()


def native_model(root: Path, name: str, body: str) -> None:
    """A native model in a repository; `body` is that of its class."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text('backend: "trio_infer"\n', encoding="utf-8")
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"import logging, trio\nfrom trio_infer import Model\n\n\nclass It(Model):\n{lines}"
    (version / "model.py").write_text(code, encoding="utf-8")


# -- Up -------------------------------------------------------------------------------------------------------------


@needs("curl")
def test_the_first_line_says_where_it_is_ready_and_the_hints_below_work_as_pasted(
    start: Callable[..., Command],
) -> None:
    command = start()
    assert re.fullmatch(
        r"trio-infer 0\.\d+\.\d+ is ready on http://127\.0\.0\.1:\d+ \(models: identity, scribe, slow, summarize\)",
        command.ready(),
    )
    command.await_log("noticed after some 75 s")
    lines = [command.out.get(timeout=PATIENCE) for _ in range(5)]
    identity, summarize, slow = (line for line in lines if line.startswith("  curl "))

    def paste(line: str) -> str:
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=PATIENCE, check=True).stdout

    assert json.loads(paste(identity))["outputs"][0]["data"] == [1.0, 2.0, 3.0]
    events = [json.loads(line.removeprefix("data: ")) for line in paste(summarize).splitlines() if line]
    assert [event["model_name"] for event in events] == ["summarize"] * 2
    assert all(event["text_output"] in summarize for event in events)

    curl = subprocess.Popen(["bash", "-c", f"exec {slow.strip()}"])
    command.await_log("slow: step 2 of 100")
    curl.send_signal(signal.SIGINT)  # Ctrl-C
    curl.wait(timeout=PATIENCE)
    command.await_log("slow: stopped at step ")
    command.await_log("499")
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == 0


def test_over_tls_a_repository_of_ones_own_is_served_and_all_is_logged_if_asked_for(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "all.pem")
    native_model(tmp_path / "models", "mine", "async def infer(self, request):\n    return {}")
    command = start(str(tmp_path / "models"), "--ssl-certfile", str(tmp_path / "all.pem"), "--id=me", "--access-log")
    assert re.search(r"is ready on https://127\.0\.0\.1:\d+ \(models: mine\)$", command.ready())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    connection = http.client.HTTPSConnection("127.0.0.1", command.port, context=trusting, timeout=PATIENCE)
    connection.request("GET", "/v2")
    assert json.load(connection.getresponse())["name"] == "me"
    command.await_log("GET /v2 200 after ")
    command.process.send_signal(signal.SIGINT)  # `connection` is idle, and no reason to wait
    assert command.end() == 0
    connection.close()
    assert command.out.empty()


# -- Down -----------------------------------------------------------------------------------------------------------


def test_sigterm_lets_a_running_request_finish_and_no_half_header_delays_that(
    start: Callable[..., Command],
) -> None:
    command = start()
    command.ready()
    with command.connect() as stuck:
        stuck.sendall(b"POST /v2/models/slow/inf")
        connection = command.post_slow(steps=12)
        command.await_log("slow: step 1 of 12")
        command.process.send_signal(signal.SIGTERM)
        command.await_log("SIGTERM: going down, requests have 30 s to finish; once more, and it is now")
        assert command.refuses()
        response = connection.getresponse()
        assert json.load(response)["steps_done"] == 12
        assert response.headers["connection"] == "close"
        before = time.monotonic()
        assert command.end() == 0
        assert time.monotonic() - before < 3  # its header time-out would be 60 s


def test_when_the_time_to_finish_is_over_the_rest_is_stopped_and_the_exit_is_still_orderly(
    start: Callable[..., Command],
) -> None:
    command = start("--exit-timeout-secs=0.2")
    command.ready()
    connection = command.post_slow(steps=1000)
    command.await_log("slow: step 1 of 1000")
    command.process.send_signal(signal.SIGTERM)
    response = connection.getresponse()
    assert (response.status, "error" in json.load(response)) == (503, True)
    assert command.end() == 0
    assert any("slow: stopped at step" in line for line in command.log)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_means_now(number: signal.Signals, code: int, start: Callable[..., Command]) -> None:
    command = start()
    command.ready()
    command.post_slow(steps=1000)
    command.await_log("slow: step 1 of 1000")
    command.process.send_signal(signal.SIGINT)
    command.await_log("going down, requests have 30 s")
    command.process.send_signal(number)
    command.await_log(f"{number.name}: going down now")
    assert command.end() == code
    assert any("slow: stopped at step" in line for line in command.log)


def test_a_signal_while_models_load_ends_it_at_once(start: Callable[..., Command], tmp_path: Path) -> None:
    body = """async def load(self):
    logging.getLogger(__name__).info("loading for ever")
    await trio.sleep_forever()

async def infer(self, request):
    return {}"""
    native_model(tmp_path, "endless", body)
    command = start(str(tmp_path))
    command.await_log("loading for ever")
    command.process.send_signal(signal.SIGTERM)
    command.await_log("SIGTERM: not starting")
    assert command.end() == 0
    assert command.out.empty()


# -- Not at all -----------------------------------------------------------------------------------------------------


@pytest.fixture
def complain(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs `serve` in this process, which must fail, and gives its last line."""

    def complain(*words: object) -> str:
        capsys.readouterr()
        assert main(["serve", *map(str, words)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        (line,) = (line for line in err.splitlines() if line.startswith("trio-infer: "))
        return line.removeprefix("trio-infer: ")

    logger = logging.getLogger("trio_infer")
    level = logger.level
    yield complain
    logger.setLevel(level)


def test_a_port_in_use_is_said_in_one_line(complain: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert complain(f"--http-port={port}") == (
            f"can't listen on 127.0.0.1:{port}: port {port} is in use; stop what listens there, or choose another with "
            "--http-port (0 picks a free one)"
        )


def test_an_address_that_is_not_ours_is_said_in_one_line(complain: Callable[..., str]) -> None:
    line = complain("--http-address=192.0.2.1", "--http-port=0")
    assert line == "can't listen on 192.0.2.1:0: Cannot assign requested address"


def test_a_missing_repository_is_said_in_one_line(complain: Callable[..., str], tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'} " in complain(tmp_path / "nowhere")


def test_a_broken_configuration_is_said_in_one_line_with_file_and_line(
    complain: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    file = tmp_path / "broken" / "config.pbtxt"
    file.write_text('name: "broken"\nmax_batch_size: many\n', encoding="utf-8")
    line = complain(tmp_path, "--http-port=0")
    assert line.startswith("model 'broken' can't be loaded: ")
    assert f"{file}:2" in line


def test_a_model_that_fails_to_load_is_said_in_one_line_and_its_traceback_is_there_for_the_asking(
    complain: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "async def infer(self, request):\n    return {}\n\nasync def load(self):\n    raise ValueError('no weights')"
    native_model(tmp_path, "weightless", body)
    line = complain(tmp_path, "--http-port=0")
    assert line == "model 'weightless' can't be loaded: ValueError: no weights"
    assert "Traceback" not in caplog.text
    assert complain(tmp_path, "--http-port=0", "--log-verbose=1") == line
    assert "raise ValueError('no weights')" in caplog.text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--ssl-keyfile=key.pem"], "--ssl-keyfile needs --ssl-certfile, the certificate that the key belongs to"),
        (["--ssl-certfile=no.pem"], "--ssl-certfile: can't read no.pem: No such file or directory"),
        (
            ["--ssl-certfile=odd.pem", "--ssl-keyfile=no.pem"],
            "--ssl-keyfile: can't read no.pem: No such file or directory",
        ),
        (["--ssl-certfile=odd.pem"], "can't serve TLS with odd.pem: "),
        (
            ["--ssl-certfile=cert.pem", "--ssl-keyfile=other.pem"],
            "can't serve TLS with cert.pem and other.pem: key values mismatch",
        ),
    ],
)
def test_a_certificate_that_does_not_do_is_said_in_one_line(
    words: list[str], line: str, complain: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    authority = trustme.CA()
    authority.issue_cert("one").cert_chain_pems[0].write_to_path("cert.pem")
    authority.issue_cert("other").private_key_pem.write_to_path("other.pem")
    Path("odd.pem").write_text("not a certificate", encoding="utf-8")
    assert complain(*words).startswith(line)


def test_too_low_a_limit_on_open_files_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, complain: Callable[..., str], tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    native_model(tmp_path, "bad", "async def infer(self, request):\n    return {}\n\nasync def load(self):\n    1 / 0")
    complain(tmp_path, "--http-port=0")
    assert asked == [(4096, 4096)]
    assert "may open 4096 files, enough for some 4032 connections, not 16384" in caplog.text
    complain(tmp_path, "--http-port=0", "--max-connections=2000", "--half-close=wait")
    assert asked[1:] == [(4064, 4096)]


# -- The rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "trio_infer"], [str(Path(sys.executable).parent / "trio-infer")]]
)
def test_the_version_is_said(program: list[str]) -> None:
    said = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert re.fullmatch(r"trio-infer \d+\.\d+\.\d+\n", said.stdout)
    assert said.stderr == ""


def test_a_reader_that_has_seen_enough_of_the_help_is_no_accident() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nowhere:
        said = subprocess.run(
            [sys.executable, "-m", "trio_infer", "serve", "--help"],
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert said.stderr == ""
