"""The command: `trio-infer serve [REPOSITORY...] [options]`.

It turns words into `Options`, and whatever was wrong into one line on stderr and exit code 1. The server, numpy and
trio are imported when they are about to be needed, so that `--help` and complaints are quick; for the same reason this
file does without postponed annotations: cyclopts reads those of `serve`, whose names are local.
"""

import os
import sys
import textwrap
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from trio_infer._version import __version__
from trio_infer.errors import SetupError

if TYPE_CHECKING:  # cyclopts takes a fifth of a second, rich (for help) another
    from cyclopts import App
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

__all__ = ["main"]

TRUTHS: Final = frozenset({"true", "false", "1", "0"})

METAVARS: Final = {"INT": "N", "FLOAT": "SECONDS", "STR": "TEXT", "PATH": "FILE"}
"""What stands for a value in help; all options that are floats are times."""

WIDEST: Final = 100
"""Columns of help on a wide terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; None for the process's own.

    Returns:
        The exit code: 0 after help, or after an orderly way down; 1 if what was asked for can't be done; 128 plus the
        signal's number if a second signal stopped requests at once (130 for Ctrl-C).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["version"]):
        sys.stdout.write(f"trio-infer {__version__}\n")
        return 0
    try:
        return _run(words)
    except SetupError as error:
        sys.stderr.write(f"trio-infer: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `trio-infer serve --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    from cyclopts import CycloptsError

    from trio_infer.option_sources import SWITCHES, explain

    try:
        command, bound, _ = _app().parse_args(_with_values(words, SWITCHES), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise explain(error) from error
    return command(*bound.args, **bound.kwargs) or 0


def _app() -> "App":
    from cyclopts import App, Parameter

    from trio_infer.option_sources import SOURCES
    from trio_infer.options import MODELS, Options

    app = App(
        name="trio-infer",
        help="An inference server that speaks Triton's HTTP interface: when the client leaves, the work stops.",
        version=f"trio-infer {__version__}",
        usage="Usage: trio-infer serve [REPOSITORY...] [options]",
        config=SOURCES,
        help_format="plaintext",
        help_formatter=_Help(),
        default_parameter=Parameter(negative_iterable=()),
    )

    @app.command(usage="Usage: trio-infer serve [REPOSITORY...] [options]")
    def serve(
        *repository: Annotated[Path, Parameter(group=MODELS, show=False)],
        options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - frozen
    ) -> int:
        """Serve the models of each REPOSITORY; without one, a few models to try.

        Each option --some-name is also the environment variable TRIO_INFER_SOME_NAME, and some-name in the TOML file
        given by --config. A flag wins over the environment, the environment over the file.

        Triton's options for gRPC are accepted, too; nothing listens there.
        """
        from trio_infer.app import run

        return run(options)

    return app


def _with_values(words: Iterable[str], switches: Container[str]) -> list[str]:
    """`--log-info false` as `--log-info=false`, so that both spellings do for every option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in switches and word.lower() in TRUTHS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Help:
    """Lays out help as plain text: an option's names, and below them, indented, what it does."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        if not panel.entries:
            return
        lines = [f"{panel.title}:"]
        for entry in panel.entries:
            labels = _labels(entry)
            lines += [f"  {labels}", *_wrapped(_about(entry), console.width, "      ")]
        _print(console, "\n".join(lines) + "\n")

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: Any) -> None:
        _print(console, f"{_plain(usage)}\n")

    def render_description(self, console: "Console", options: "ConsoleOptions", description: Any) -> None:
        for paragraph in _plain(description).split("\n\n"):
            _print(console, "\n".join(_wrapped(paragraph, console.width, "")) + "\n")


def _labels(entry: "HelpEntry") -> str:
    labels = ", ".join(entry.display_labels)
    if entry.choices:
        return f"{labels} {'|'.join(entry.choices)}"
    return f"{labels} {METAVARS.get(entry.metavar, entry.metavar)}" if entry.metavar else labels


def _about(entry: "HelpEntry") -> str:
    text = _plain(entry.description).replace("*", "")
    text = f"{text[:1].upper()}{text[1:]}"
    if entry.default in (None, "()"):
        return text
    default = entry.default.lower() if entry.default in {"True", "False"} else entry.default.removesuffix(".0")
    return f"{text} [default: {default}]"


def _plain(renderable: Any) -> str:
    text = getattr(renderable, "primary_renderable", renderable)
    return str(getattr(text, "plain", text) or "").strip()


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        min(width, WIDEST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _print(console: "Console", text: str) -> None:
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
