"""Every example in README.md and docs/ is run, as a reader would: in the order of its page.

The fenced blocks of a page share a directory, a namespace for Python and, once the page has started one, a server. What
happens to a block follows from its language, and from an HTML comment before it that readers don't see:

    python                          executed
    sh                              run by bash, which must succeed
    text, json, http                what the block before printed; ... is anything; JSON is compared as values
    any, <!-- file: NAME -->        written to that file
    sh, <!-- server -->             started, and left running until the page ends or starts another
    sh, <!-- ctrl-c: LINE -->       interrupted as soon as the server has logged LINE
    sh, <!-- set-up -->             installs first: only what comes after that is run here, and .ci/run runs it whole
    text, <!-- log -->              these lines are in the server's log, in this order
    text, <!-- log, SIGNAL -->      the same, after the server was sent a signal
    text, <!-- picture -->          nothing; it is a drawing
    any, <!-- needs: PACKAGE -->    what it is without that (or `PACKAGE, KIND`); the rest of the page is skipped if
                                    PACKAGE isn't installed

A block that none of this fits is an error, so nothing is left out in silence. Directives (```{name}) are Sphinx's, and
have a test of their own. Port 8000 stands for a free one.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import attrs
import pytest
from sybil import Document, Example, Region, Sybil

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*?) -->\n+)?"
    r"^(?P<ticks>`{3,})(?P<language>\{?[\w-]*\}?)[^\n]*\n(?P<body>.*?)^(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"(?<!\!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\((?P<target>[^)\s]+)\)")
SET_UP = ("python3 -m venv .venv", ".venv/bin/pip install --quiet ")
PATIENCE = 20.0


@attrs.frozen
class Block:
    """A fenced block."""

    language: str
    comment: str
    body: str


def parse(document: Document) -> Iterator[Region]:
    for match in FENCE.finditer(document.text):
        block = Block(match["language"], match["comment"] or "", match["body"])
        if not block.language.startswith("{"):
            yield Region(match.start("ticks"), match.end(), block, evaluate)


def evaluate(example: Example) -> str | None:
    stage: Stage = example.namespace["stage"]
    return stage.play(example.parsed, example.path, example.line)


class Stage:
    """Where one page's examples are played."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = str(sock.getsockname()[1])
        self.names: dict[str, Any] = {"__name__": "example"}
        self.printed = ""
        self.server: subprocess.Popen[bytes] | None = None
        self.log_read = 0
        (directory / ".venv").symlink_to(sys.prefix)
        self.environment = os.environ | {
            "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}",
            "TRIO_INFER_HTTP_PORT": self.port,
            "TRIO_INFER_METRICS_PORT": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def play(self, block: Block, path: str, line: int) -> str | None:
        kind, _, rest = block.comment.partition(":")
        if kind == "needs":
            package, _, kind = (part.strip() for part in rest.partition(","))
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{Path(path).name}: from line {line} on it needs {package}")
        body = block.body.replace("8000", self.port)
        plays: dict[tuple[str, str], Callable[[], str | None]] = {
            ("python", ""): lambda: self.execute(body, path, line),
            ("sh", ""): lambda: self.run(body),
            ("sh", "server"): lambda: self.start(body),
            ("sh", "set-up, server"): lambda: self.start(without_set_up(body)),
            ("sh", "set-up"): lambda: check_test_line(without_set_up(body), body),
            ("sh", "ctrl-c"): lambda: self.interrupt(body, rest.strip()),
            ("text", ""): lambda: self.compare(block.body),
            ("http", ""): lambda: self.compare(block.body),
            ("json", ""): lambda: self.compare_json(block.body),
            ("text", "log"): lambda: self.find_in_log(block.body),
            ("text", "picture"): lambda: None,
        }
        if kind == "file":
            return self.write(rest.strip(), body)
        if kind.startswith("log, SIG"):
            return self.signal(kind.removeprefix("log, "), block.body)
        if (block.language, kind) not in plays:
            return f"nobody knows what to do with a block of {block.language!r} after <!-- {block.comment} -->"
        return plays[block.language, kind]()

    def write(self, name: str, body: str) -> None:
        file = self.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)

    def execute(self, body: str, path: str, line: int) -> None:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * line + body, path, "exec"), self.names)
        self.printed = printed.getvalue()

    # -- Commands ---------------------------------------------------------------------------------------------------

    def command(self, body: str) -> dict[str, Any]:
        if re.search(r"\bcurl\b", body) and shutil.which("curl") is None:
            pytest.skip("the examples need curl")
        return {"args": ["bash", "-euo", "pipefail", "-c", body], "cwd": self.directory, "env": self.environment}

    def run(self, body: str) -> str | None:
        out, err = self.directory / "command.out", self.directory / "command.err"  # what goes on with & may keep them
        with out.open("wb") as stdout, err.open("wb") as stderr:
            done = subprocess.run(**self.command(body), stdout=stdout, stderr=stderr, timeout=PATIENCE, check=False)
        self.printed = out.read_text()
        return f"exit code {done.returncode}: {err.read_text()}" if done.returncode else None

    def start(self, body: str) -> str | None:
        self.stop()
        out, err = self.directory / "server.out", self.directory / "server.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            command = self.command(body.strip())  # one simple command, so bash makes way for it
            self.server = subprocess.Popen(**command, stdout=stdout, stderr=stderr, start_new_session=True)
        self.log_read = 0

        def is_ready() -> bool:
            return f":{self.port}" in out.read_text() or self.server is None or self.server.poll() is not None

        if not wait_for(is_ready) or self.server.poll() is not None:
            return f"the server doesn't start: {out.read_text()}{err.read_text()}"
        time.sleep(0.1)  # the rest of what it prints
        self.printed = out.read_text()
        return None

    def stop(self) -> None:
        if self.server is not None:
            if self.server.poll() is None:
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()
            self.server = None

    def interrupt(self, body: str, line: str) -> str | None:
        with subprocess.Popen(**self.command(body), stdout=subprocess.PIPE, start_new_session=True) as process:
            seen = wait_for(lambda: line in self.log())
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        return None if seen else f"the server never logged {line!r}:\n{self.log()}"

    def signal(self, name: str, expected: str) -> str | None:
        assert self.server is not None
        os.killpg(self.server.pid, signal.Signals[name])
        return self.find_in_log(expected)

    # -- What came of it --------------------------------------------------------------------------------------------

    def compare(self, expected: str) -> str | None:
        got = self.printed.replace(self.port, "8000").replace("\r\n", "\n").strip()
        return None if matches(expected.strip(), got) else f"expected:\n{expected}\ngot:\n{got}"

    def compare_json(self, expected: str) -> str | None:
        return None if json.loads(self.printed) == json.loads(expected) else f"got {self.printed}"

    def log(self) -> str:
        return (self.directory / "server.err").read_text().replace(self.port, "8000")[self.log_read :]

    def find_in_log(self, expected: str) -> str | None:
        if not wait_for(lambda: find_lines(expected, self.log()) is not None):
            return f"not in the server's log:\n{expected}\nbut only:\n{self.log()}"
        self.log_read += find_lines(expected, self.log()) or 0
        return None


def without_set_up(body: str) -> str:
    """The last command of a line that first makes an environment and installs the package in it."""
    *installing, last = body.strip().split(" && ")
    assert len(installing) == 2, body
    for command, start in zip(installing, SET_UP, strict=True):
        assert command.startswith(start), command
    return last


def check_test_line(last: str, body: str) -> None:
    """This very test runs because of it, so it is not run once more."""
    assert last == ".venv/bin/python -m pytest"
    extras = re.search(r"'\.\[(.*)\]'", body)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras[1] in project["optional-dependencies"]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return true


def matches(pattern: str, text: str) -> bool:
    regex = ".*?".join(re.escape(piece) for piece in pattern.split("..."))
    return re.fullmatch(regex, text, re.DOTALL) is not None


def find_lines(expected: str, log: str) -> int | None:
    """How far into the log one has read when all expected lines were found, in their order."""
    position = 0
    lines = log.splitlines(keepends=True)
    for wanted in filter(None, map(plain, expected.splitlines())):
        for line in itertools.islice(lines, position, None):
            position += 1
            if matches(wanted, plain(line)):
                break
        else:
            return None
    return sum(map(len, lines[:position]))


def plain(line: str) -> str:
    """A line of a log without what differs from run to run: its time, process and source line, durations, steps."""
    line = re.sub(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [\w.]+:\d+\] ", r"\1 ", line.strip())
    line = re.sub(r"\d+(?:\.\d+)? (ms|s)\b", r"_ \1", line)
    return re.sub(r"step \d+", "step _", line)


# -- The tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_examples_of_a_page_do_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("bash") is None:
        pytest.skip("the examples need bash")
    monkeypatch.chdir(tmp_path)
    stage = Stage(tmp_path)
    document = Sybil([parse], path=str(page.parent), pattern=page.name).parse(page)
    document.namespace["stage"] = stage
    try:
        for example in document.examples():
            example.evaluate()
    finally:
        stage.stop()


def test_there_are_examples_and_each_fence_is_closed() -> None:
    assert len(PAGES) > 8
    for page in PAGES:
        text = page.read_text()
        fences = len(re.findall(r"^`{3,}", text, re.MULTILINE))
        assert fences == 2 * len(FENCE.findall(text)), page


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_relative_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text())):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {match['target']}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {match['target']}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MyST make of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_table_that_is_generated_has_a_row_for_each_of_its_facts() -> None:
    from trio_infer.lifecycle import NEXT, OUTCOMES
    from trio_infer.observe.metrics import FAMILIES
    from trio_infer.protocol.datatypes import Datatype
    from trio_infer.wire.sights import ROWS

    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "_ext" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    generated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generated)
    assert len(generated.sights().splitlines()) == 2 + len(ROWS)
    assert len(generated.phases().splitlines()) == 2 + len(NEXT)
    assert len(generated.metrics().splitlines()) == 2 + len(FAMILIES)
    assert len(generated.datatypes().splitlines()) == 2 + len(Datatype)
    assert all(outcome.value in generated.phases() for outcomes in OUTCOMES.values() for outcome in outcomes)
    shown = set(re.findall(r"`(--[\w-]+)`", generated.options()))
    usage = subprocess.run([sys.executable, "-m", "trio_infer", "serve", "--help"], capture_output=True, check=True)
    known = set(re.findall(r"--(?!no-)[\w-]+", usage.stdout.decode())) - {"--some-name"}
    assert {flag for flag in known if f"`{flag}`" not in generated.options()} == set()
    assert shown >= known - {"--help", "--version"}


@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="needs the docs extra: sphinx, myst-parser, furo"
)
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "--keep-going", "-b", "html", "-d", tmp_path / "trees"]
    done = subprocess.run([*command, ROOT / "docs", tmp_path / "html"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "html" / "sentinel.html").is_file()
