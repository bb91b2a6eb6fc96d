"""Flags, environment and file make one `Options`; each complaint is one line that says where it was said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trio_infer import DisconnectPolicy, Keepalive, Limits, SetupError
from trio_infer.cli import main
from trio_infer.option_ignored import REASONS, Ignored, IgnoredGRPC
from trio_infer.options import CloudFronts, Options

Read = Callable[..., Options]
Complain = Callable[..., str]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TRIO_INFER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Runs the command up to where the server would start."""
    seen: list[Options] = []

    def keep(options: Options) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("trio_infer.app.run", keep)

    def read(*words: str) -> Options:
        assert main(["serve", *words]) == 0
        return seen.pop()

    return read


@pytest.fixture
def complain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complain:
    """Runs the command, which must refuse, and gives its one line."""

    def must_not_run(options: Options) -> int:
        raise AssertionError(options)

    monkeypatch.setattr("trio_infer.app.run", must_not_run)

    def complain(*words: str) -> str:
        assert main(list(words)) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("trio-infer: ")
        return err.removeprefix("trio-infer: ").rstrip()

    return complain


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("server.toml").write_text(text, encoding="utf-8")
        return "--config=server.toml"

    return write


# -- What comes out --------------------------------------------------------------------------------------------------


def test_with_nothing_said_the_command_has_the_classes_own_defaults(read: Read) -> None:
    assert read() == Options()


def test_an_equals_sign_and_a_space_do_for_every_option(read: Read) -> None:
    assert read("--http-port=1", "--log-info=false", "--half-close=wait") == read(
        "--http-port", "1", "--log-info", "false", "--half-close", "wait"
    )


def test_a_switch_may_stand_alone_before_a_repository(read: Read) -> None:
    options = read("--access-log", "models")
    assert options.access_log
    assert options.model_repository == (Path("models"),)


def test_repositories_may_be_arguments_and_flags_at_once(read: Read) -> None:
    options = read("--model-repository", "a", "b", "c", "--model-store=d")
    assert sorted(options.model_repository) == [Path("a"), Path("b"), Path("c"), Path("d")]


def test_every_value_of_the_nested_classes_is_an_option_of_its_own(read: Read) -> None:
    def others(kind: type[attrs.AttrsInstance]) -> dict[str, object]:
        given = {"on_disconnect": "finish", "half_close": "wait", "pipelined": "watch"}
        return {field.name: given.get(field.name, 7) for field in attrs.fields(kind)}

    limits, disconnects, keepalive = others(Limits), others(DisconnectPolicy), others(Keepalive)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (limits | disconnects | keepalive).items()]
    assert read(*words) == Options(
        limits=Limits(**limits),  # type: ignore[arg-type]
        disconnects=DisconnectPolicy(**disconnects),  # type: ignore[arg-type]
        keepalive=Keepalive(**keepalive),  # type: ignore[arg-type]
    )


def test_each_option_can_be_a_variable(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_INFER_HTTP_PORT", "1")
    monkeypatch.setenv("TRIO_INFER_MODEL_REPOSITORY", os.pathsep.join(["a", "b"]))
    monkeypatch.setenv("TRIO_INFER_ACCESS_LOG", "true")
    monkeypatch.setenv("TRIO_INFER_IDLE_TIMEOUT", "2.5")
    assert read() == Options(
        http_port=1, model_repository=(Path("a"), Path("b")), access_log=True, limits=Limits(idle_timeout=2.5)
    )


def test_what_kubernetes_sets_for_a_service_of_our_name_is_nothing_to_us(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_INFER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TRIO_INFER_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("TRIO_INFER_PORT_8000_TCP_PROTO", "tcp")
    assert read() == Options()


def test_each_option_can_be_a_key_of_the_file(read: Read, toml: Callable[[str], str]) -> None:
    file = toml(
        'http-port = 1\nmodel-repository = ["a", "b"]\naccess-log = true\nidle-timeout = 2\nhalf-close = "wait"'
    )
    assert read(file) == Options(
        http_port=1,
        model_repository=(Path("a"), Path("b")),
        access_log=True,
        limits=Limits(idle_timeout=2.0),
        disconnects=DisconnectPolicy(half_close="wait"),
        config=Path("server.toml"),
    )


def test_a_file_that_nobody_names_is_not_read(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trio-infer.toml").write_text("http-port = 1", encoding="utf-8")
    assert read() == Options()


@pytest.mark.parametrize(
    ("said", "wins"),
    [
        ("flag variable file", 1),
        ("flag variable", 1),
        ("flag file", 1),
        ("variable file", 2),
        ("variable", 2),
        ("file", 3),
        ("", 8000),
    ],
)
def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    said: str, wins: int, read: Read, toml: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--http-port=1", "--header-timeout=1"] if "flag" in said else []
    if "variable" in said:
        monkeypatch.setenv("TRIO_INFER_HTTP_PORT", "2")
        monkeypatch.setenv("TRIO_INFER_HEADER_TIMEOUT", "2")
    if "file" in said:
        words.append(toml("http-port = 3\nheader-timeout = 3"))
    options = read(*words)
    assert options.http_port == wins
    assert options.limits.header_timeout == (60 if wins == 8000 else wins)


def test_the_three_mix_within_one_class(
    read: Read, toml: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_INFER_BODY_TIMEOUT", "2")
    options = read(toml("idle-timeout = 3"), "--header-timeout=1")
    assert options.limits == Limits(header_timeout=1.0, body_timeout=2.0, idle_timeout=3.0)


@pytest.mark.parametrize("words", [["a"], ["--model-repository=a"], ["--model-store", "a"]])
def test_repositories_on_the_command_line_replace_those_from_elsewhere(
    words: list[str], read: Read, toml: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIO_INFER_MODEL_REPOSITORY", "b")
    assert read(toml('model-repository = ["c"]'), *words).model_repository == (Path("a"),)


def test_the_file_can_be_named_by_a_variable(
    read: Read, toml: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml("http-port = 1")
    monkeypatch.setenv("TRIO_INFER_CONFIG", "server.toml")
    assert read().http_port == 1


# -- Triton's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ignored, IgnoredGRPC])
def test_each_option_that_is_ignored_is_taken_in_both_spellings(read: Read, kind: type[attrs.AttrsInstance]) -> None:
    together: list[str] = []
    apart: list[str] = []
    for field in attrs.fields(kind):
        flag, value = f"--{field.name.replace('_', '-')}", "true" if "bool" in str(field.type) else "7"
        together.append(f"{flag}={value}")
        apart += [flag, value]
    one, other = read(*together, "models"), read(*apart, "models")
    assert one == other
    assert one.model_repository == (Path("models"),)
    given = one.ignored if kind is Ignored else one.grpc
    assert all(value in (True, "7", ("7",)) for value in attrs.asdict(given).values())


def test_the_response_cache_is_as_large_as_the_newer_of_its_options_says(read: Read) -> None:
    assert read().response_cache == 0
    assert read("--response-cache-byte-size=5").response_cache == 5
    assert read("--response-cache-byte-size=5", "--cache-config", "local,size=7").response_cache == 7
    for wrong in ("redis,host=there", "local", "local,size=1.5", "local,size=-1", "local,sise=1", "size=1"):
        with pytest.raises(SetupError, match=rf"--cache-config must be local,size=BYTES.*got '{wrong}'"):
            _ = read(f"--cache-config={wrong}").response_cache


def test_for_each_option_that_is_ignored_there_is_a_reason() -> None:
    assert list(REASONS) == [field.name for field in attrs.fields(Ignored)]
    assert Ignored(host_policy=("0,numa-node=0",)).reasons() == {
        "--host-policy": "threads and memory are not bound to nodes"
    }


# -- Complaints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--http-port x", "--http-port must be a whole number, got 'x'"),
        ("--http-port 1.5", "--http-port must be a whole number, got '1.5'"),
        ("--http-port 70000", "--http-port must be from 0 to 65535, got 70000"),
        ("--http-port", "--http-port needs a value"),
        ("--http-port 1 --http-port 2", "--http-port is given more than once"),
        ("--idle-timeout=-3", "--idle-timeout must be more than 0, got -3.0"),
        ("--idle-timeout nan", "--idle-timeout must be more than 0, got nan"),
        ("--exit-timeout-secs -1", "--exit-timeout-secs must be 0 or more, got -1.0"),
        ("--half-close maybe", "--half-close must be gone or wait, got 'maybe'"),
        ("--bad-json-status 404", "--bad-json-status must be 500 or 400, got '404'"),
        ("--log-info=maybe", "--log-info must be true or false, got 'maybe'"),
        ("--model-repository=", "--model-repository must be a path, got nothing"),
        ("--config=", "--config must be a path, got nothing"),
        ("--response-cache-byte-size=-1", "--response-cache-byte-size must be 0 or more, got -1"),
        ("--http-prt=3", "unknown option --http-prt; did you mean --http-port?"),
        ("--flux 3", "unknown option --flux; see: trio-infer serve --help"),
        ("-x", "unknown option -x; see: trio-infer serve --help"),
        ("--config nowhere.toml", "--config: can't read nowhere.toml: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected_and_got(words: str, line: str, complain: Complain) -> None:
    assert complain("serve", *words.split()) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("srve", "unknown command srve; try: trio-infer serve, or: trio-infer --help"),
        ("--http-port", "unknown option --http-port; try: trio-infer serve, or: trio-infer --help"),
    ],
)
def test_what_is_no_command_gets_a_hint(words: str, line: str, complain: Complain) -> None:
    assert complain(words) == line


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("HTTP_PORT", "x", "TRIO_INFER_HTTP_PORT must be a whole number, got 'x'"),
        ("HTTP_PORT", "", "TRIO_INFER_HTTP_PORT must be a whole number, got ''"),
        ("IDLE_TIMEOUT", "0", "TRIO_INFER_IDLE_TIMEOUT must be more than 0, got 0.0"),
        ("ACCESS_LOG", "sure", "TRIO_INFER_ACCESS_LOG must be true or false, got 'sure'"),
        ("PIPELINED", "x", "TRIO_INFER_PIPELINED must be disarm or watch, got 'x'"),
        ("CONFIG", "no.toml", "TRIO_INFER_CONFIG: can't read no.toml: No such file or directory"),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, line: str, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TRIO_INFER_{variable}", value)
    assert complain("serve") == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('http-port = "x"', "server.toml: http-port must be a whole number, got 'x'"),
        ("http-port = true", "server.toml: http-port must be a whole number, got 'True'"),
        ("http-port = 1.5", "server.toml: http-port must be a whole number, got '1.5'"),
        ("idle-timeout = -4", "server.toml: idle-timeout must be more than 0, got -4.0"),
        ('half-close = "x"', "server.toml: half-close must be gone or wait, got 'x'"),
        ("http-prt = 3", "server.toml: http-prt is not an option; did you mean http-port?"),
        ("flux = 3", "server.toml: flux is not an option"),
        ("[limits]\nidle-timeout = 4", "server.toml: limits.idle-timeout is not an option; did you mean idle-timeout?"),
        ("http-port = x", "server.toml is not TOML: Invalid value (at line 1, column 13)"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(
    text: str, line: str, complain: Complain, toml: Callable[[str], str]
) -> None:
    assert complain("serve", toml(text)) == line


@pytest.mark.parametrize("text", ["http-port = [1, 2]", 'half-close = ["gone", "wait"]'])
def test_a_list_in_the_place_of_one_value_is_refused(text: str, complain: Complain, toml: Callable[[str], str]) -> None:
    assert complain("serve", toml(text)).startswith(f"server.toml: {text.split()[0]} must be ")


# -- Help ------------------------------------------------------------------------------------------------------------


NESTED = {"limits", "control", "rate", "disconnects", "keepalive", "cloud", "traces", "grpc", "ignored"}


def test_help_groups_every_option_and_shows_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    groups = [line.rstrip(":") for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == [
        "Model repository",
        "Which models are loaded, and when",
        "Resources that instances share",
        "HTTP",
        "Fronts for cloud platforms",
        "Response cache",
        "Limits",
        "Disconnects",
        "TCP keepalive",
        "TLS",
        "Shutdown",
        "Metrics",
        "Logging",
        "Tracing",
        "Configuration file",
        "Other options of Triton: accepted, of no effect, and warned of",
    ]
    for kind in (Options, CloudFronts, Limits, DisconnectPolicy, Keepalive, Ignored):
        for field in attrs.fields(kind):
            if field.name not in {
                "limits",
                "control",
                "disconnects",
                "keepalive",
                "cloud",
                "traces",
                "grpc",
                "ignored",
            }:
                assert f"--{field.name.replace('_', '-')}" in out
    text = " ".join(out.split())
    assert "--http-address TEXT Name or address to listen on. (Triton: 0.0.0.0" in text
    assert "[default: 127.0.0.1]" in text
    assert "--half-close gone|wait `gone` takes a FIN" in text
    assert "sent an answer takes not one byte; then the request is cancelled as stalled" in text
    assert max(map(len, out.splitlines())) <= 100


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "trio-infer serve [REPOSITORY...] [options]" in capsys.readouterr().out
