"""Where options come from: flags, environment variables, the keys of a TOML file; and what is said of mistakes there.

What is said in several places is taken from the first of: flag, variable, file, default. The parsing is cyclopts'.
Three things are added as *sources*, which cyclopts calls in turn with the arguments that have been found so far:

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
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import attrs
import cyclopts
from cyclopts import App, CycloptsError, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Dict, Env

from trio_infer.errors import SetupError
from trio_infer.options import Options

__all__ = ["SOURCES", "SWITCHES", "explain"]

PREFIX: Final = "TRIO_INFER_"

_KINDS: Final[tuple[type[attrs.AttrsInstance], ...]] = (
    Options,
    *(hint for hint in get_type_hints(Options).values() if isinstance(hint, type) and attrs.has(hint)),
)

_VALIDATED: Final = {
    field.name: field for kind in _KINDS for field in attrs.fields(kind) if field.validator is not None
}

SWITCHES: Final = frozenset(
    f"--{name.replace('_', '-')}"
    for kind in _KINDS
    for name, hint in get_type_hints(kind).items()
    if hint in (bool, bool | None)
)
"""Options that may stand alone; Triton gives its own a value, as a word of its own."""


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
