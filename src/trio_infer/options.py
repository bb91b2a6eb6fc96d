"""The server's options: one class, from which flags, environment variables and the keys of a TOML file all come.

`Options` is plain: make one in Python, or let the command make it. An attribute `http_port` is the flag `--http-port`,
the variable `TRIO_INFER_HTTP_PORT` and the key `http-port`; its documentation is the flag's help, its default the
default. The values in `Limits`, `DisconnectPolicy` and `Keepalive` are options of the same rank, without a prefix. What
is said in several places is taken from the first of: flag, variable, file, default.

The parsing is cyclopts'. Three things are added as *sources*, which cyclopts calls in turn with the arguments that have
been found so far:

- the positional arguments are moved to `--model-repository`, so that both spellings may be mixed;
- the file is read after the environment, since the environment may name it;
- values that a validator of an attrs class refuses are refused here, while it is still known where each came from.

Each complaint is one line that names that place: `--http-port`, `TRIO_INFER_HTTP_PORT` or `server.toml: http-port`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import attrs
import cyclopts
from attrs import validators
from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Dict, Env

from trio_infer.errors import SetupError
from trio_infer.limits import DisconnectPolicy, Keepalive, Limits

__all__ = ["MODELS", "SOURCES", "Options", "explain"]

PREFIX: Final = "TRIO_INFER_"

MODELS: Final = Group("Model repository", sort_key=1)
_HTTP: Final = Group("HTTP", sort_key=2)
_LIMITS: Final = Group("Limits", sort_key=3)
_DISCONNECTS: Final = Group("Disconnects", sort_key=4)
_KEEPALIVE: Final = Group("TCP keepalive", sort_key=5)
_TLS: Final = Group("TLS", sort_key=6)
_SHUTDOWN: Final = Group("Shutdown", sort_key=7)
_LOGGING: Final = Group("Logging", sort_key=8)
_FILE: Final = Group("Configuration file", sort_key=9)


def _port(instance: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"{attribute.name} must be from 0 to 65535, got {value}")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must be 0 or more, got {value}")


@attrs.frozen(kw_only=True)
class Options:
    """All that the command can be told.

    Attributes:
        model_repository: directory of models: MODEL/config.pbtxt and MODEL/VERSION/model.py in it; may be given several
            times. With none, models to try the server with are served.
        http_address: name or address to listen on. (Triton: 0.0.0.0, that is, all the world; say so if you want that.)
        http_port: port to listen on; 0 picks a free one.
        id: the server's name in its metadata. (Triton: triton.)
        bad_json_status: what a request with unreadable JSON is answered. (Triton: 500; choose 400 if your alarms count
            5xx.)
        limits: bounds on what clients may take.
        disconnects: what counts as a client that left, and what happens then.
        keepalive: how TCP notices peers that vanished.
        ssl_certfile: serve https, with this certificate chain (PEM).
        ssl_keyfile: its private key (PEM), if not in the same file.
        exit_timeout_secs: seconds that requests in hand have to finish after SIGTERM or Ctrl-C; a second signal stops
            them at once. (Triton: 30.)
        log_verbose: 1 logs more, and tracebacks of models that can't be loaded; 2 also logs what libraries have to say.
        log_info: log what is not a warning, such as clients that leave.
        access_log: log each request; those that are cancelled are logged anyway.
        config: TOML file with these options, without the dashes in front.
    """

    model_repository: Annotated[
        tuple[Path, ...],
        Parameter(
            name=("--model-repository", "--model-store"),
            group=MODELS,
            negative=(),
            show_default=False,
            metavar="DIRECTORY",
        ),
    ] = ()
    http_address: Annotated[str, Parameter(group=_HTTP)] = "127.0.0.1"
    http_port: Annotated[int, Parameter(group=_HTTP)] = attrs.field(default=8000, validator=_port)
    id: Annotated[str, Parameter(group=_HTTP)] = "trio-infer"
    bad_json_status: Annotated[Literal[500, 400], Parameter(group=_HTTP)] = attrs.field(
        default=500, validator=validators.in_((500, 400))
    )
    limits: Annotated[Limits, Parameter(name="*", group=_LIMITS)] = attrs.field(factory=Limits)
    disconnects: Annotated[DisconnectPolicy, Parameter(name="*", group=_DISCONNECTS)] = attrs.field(
        factory=DisconnectPolicy
    )
    keepalive: Annotated[Keepalive, Parameter(name="*", group=_KEEPALIVE)] = attrs.field(factory=Keepalive)
    ssl_certfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    ssl_keyfile: Annotated[Path | None, Parameter(group=_TLS)] = None
    exit_timeout_secs: Annotated[float, Parameter(group=_SHUTDOWN)] = attrs.field(default=30.0, validator=_not_negative)
    log_verbose: Annotated[int, Parameter(group=_LOGGING)] = attrs.field(default=0, validator=_not_negative)
    log_info: Annotated[bool, Parameter(group=_LOGGING)] = True
    access_log: Annotated[bool, Parameter(group=_LOGGING)] = False
    config: Annotated[Path | None, Parameter(group=_FILE)] = None


_VALIDATED: Final = {
    field.name: field
    for kind in (Options, Limits, DisconnectPolicy, Keepalive)
    for field in attrs.fields(kind)
    if field.validator is not None
}


# -- Sources --------------------------------------------------------------------------------------------------------


def _move_positionals(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    repositories = _named("--model-repository", arguments)
    for argument in arguments:
        if repositories is not None and argument.is_var_positional() and argument.tokens:
            repositories.tokens += argument.tokens
            argument.tokens.clear()
            for index, token in enumerate(repositories.tokens):
                repositories.tokens[index] = token.evolve(keyword=repositories.name, index=index)


def _read_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    argument = _named("--config", arguments)
    if argument is None or not argument.tokens:
        return
    _check_tokens(argument)
    path = Path(argument.tokens[-1].value)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{_place(argument.tokens[-1])}: can't read {path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise SetupError(f"{path} is not TOML: {error}") from error
    Dict(data, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


def _check_values(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    for argument in arguments:
        field = _VALIDATED.get(argument.field_info.name)
        _check_tokens(argument)
        if field is None or field.validator is None or not argument.tokens:
            continue
        value = argument.convert()
        try:
            field.validator(None, field, value)
        except ValueError as error:
            reason = str(error).removeprefix(field.name)
            raise SetupError(f"{_place(argument.tokens[-1])}{reason}") from error


def _check_tokens(argument: Argument) -> None:
    """Refuse what cyclopts is too obliging about: it rounds 1.5 to 2, and takes "" for the current directory."""
    kind = argument.hint
    for token in argument.tokens:
        if kind is int and not re.fullmatch(r"[+-]?[0-9]+", token.value):
            raise SetupError(f"{_place(token)} must be a whole number, got {token.value!r}")
        if Path in (kind, *get_args(kind)) and not token.value:
            raise SetupError(f"{_place(token)} must be a path, got nothing")
        if token.index and get_origin(kind) is not tuple:
            raise SetupError(f"{_place(token)} must be one value, got a list")


def _named(name: str, arguments: ArgumentCollection) -> Argument | None:
    return next((argument for argument in arguments if argument.name == name), None)


SOURCES: Final = (_move_positionals, Env(PREFIX, command=False, show=False), _read_file, _check_values)
"""What the command's cyclopts `App` takes as its `config`."""


# -- Complaints -----------------------------------------------------------------------------------------------------


def explain(error: CycloptsError) -> SetupError:
    """What to tell the operator: one line that names the flag, variable or file, what was expected and what was got.

    Args:
        error: as cyclopts raised it.
    """
    token: Token | None = getattr(error, "token", None)
    if token is None and error.argument is not None and error.argument.tokens:
        token = error.argument.tokens[-1]
    match error:
        case cyclopts.UnknownOptionError():
            return SetupError(_unknown(error))
        case cyclopts.RepeatArgumentError():
            return SetupError(f"{error.token.keyword} is given more than once")
        case cyclopts.MissingArgumentError() if error.argument is not None:
            return SetupError(f"{getattr(error, 'keyword', None) or error.argument.name} needs a value")
        case cyclopts.CoercionError() if token is not None and error.target_type is not None:
            expected = _expected(error.target_type)
            return SetupError(f"{_place(token)} must be {expected}, got {token.value!r}")
        case cyclopts.UnknownCommandError() if error.unused_tokens:
            kind = "option" if error.unused_tokens[0].startswith("-") else "command"
            return SetupError(f"unknown {kind} {error.unused_tokens[0]}; try: trio-infer serve, or: trio-infer --help")
    words = " ".join(str(error).split()).removesuffix(".")
    return SetupError(words if token is None else f"{_place(token)}: {words}")


def _place(token: Token) -> str:
    key = (token.keyword or token.value).strip("[]").replace("][", ".")
    return key if token.source in {"cli", "env", ""} else f"{token.source}: {key}"


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, f"a {_name(kind)}")


def _name(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).lower()


def _unknown(error: cyclopts.UnknownOptionError) -> str:
    token = error.token
    in_file = token.source != "cli"
    what = _place(token).partition("=")[0]
    names = {name.removeprefix("--") for argument in error.argument_collection for name in argument.names}
    near = difflib.get_close_matches(what.rpartition(": ")[2].rpartition(".")[2].lstrip("-"), names, n=1)
    dashes = "" if in_file else "--"
    hint = f"; did you mean {dashes}{near[0]}?" if near else "" if in_file else "; see: trio-infer serve --help"
    return f"{what} is not an option{hint}" if in_file else f"unknown option {what}{hint}"
