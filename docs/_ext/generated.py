"""Tables and drawings of the documentation that are made from the server's own tables, so that they can't be wrong.

Each function gives MyST text; `conf.py` puts it where a page says ```` ```{generated} name ````.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
from cyclopts import Parameter

from trio_infer.api.routes import find_route
from trio_infer.errors import ErrorCode
from trio_infer.lifecycle import NEXT, OUTCOMES, Outcome, Phase
from trio_infer.limits import DisconnectPolicy
from trio_infer.models.runner import PROMISES
from trio_infer.observe.metrics import FAMILIES
from trio_infer.options import Options
from trio_infer.protocol.datatypes import Datatype
from trio_infer.wire.sights import ROWS, Action, Sight

__all__ = [
    "GENERATED",
    "datatypes",
    "endpoints",
    "errors",
    "features",
    "life",
    "metrics",
    "options",
    "outcomes",
    "phases",
    "policies",
    "promises",
    "sights",
]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _attributes(kind: type) -> dict[str, str]:
    """What a class's docstring says of each attribute."""
    section = re.split(r"^Attributes:\n", inspect.cleandoc(kind.__doc__ or ""), maxsplit=1, flags=re.MULTILINE)[1]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _peek(sight: Sight) -> str:
    return {
        Sight.QUIET: "`EAGAIN`, `EINTR`",
        Sight.DATA: "a byte",
        Sight.EOF: '`b""`',
        Sight.RESET: "`ECONNRESET` or another error",
    }[sight]


def sights() -> str:
    """The sentinel's truth table."""

    def row(sight: Sight, half_close: str, pipelined: str, action: Action) -> Sequence[str]:
        policies = [
            "any" if value == "*" else f"`{value}`{' (default)' if value == default else ''}"
            for value, default in (
                (half_close, DisconnectPolicy().half_close),
                (pipelined, DisconnectPolicy().pipelined),
            )
        ]
        return [_peek(sight), sight.value, *policies, action.value]

    return _table(
        ["`recv(1, MSG_PEEK)` gives", "which is", "`half_close`", "`pipelined`", "the sentinel"],
        [row(*entry) for entry in ROWS],
    )


def phases() -> str:
    """Where a life may go from each phase, and how it may end there."""

    def words(values: Iterable[Any], order: type) -> str:
        return ", ".join(value.value for value in order if value in values) or "–"

    return _table(
        ["in the phase", "the next may be", "or it ends as"],
        [[phase.value, words(NEXT[phase], Phase), words(OUTCOMES[phase], Outcome)] for phase in Phase],
    )


def outcomes() -> str:
    """What each outcome means, by the strings below the members of `Outcome`."""
    (definition,) = ast.parse(inspect.getsource(Outcome)).body
    assert isinstance(definition, ast.ClassDef)
    texts = [node.value.value for node in definition.body if isinstance(node, ast.Expr)][1:]
    assert len(texts) == len(Outcome)
    return _table(["outcome", "means"], [[each.value, text] for each, text in zip(Outcome, texts, strict=True)])


_STEP, _WIDTH, _TOP = 150, 112, 70


def life() -> str:
    """The phases, drawn: neighbours by straight arrows, leaps by arcs, and below each the outcomes it may have."""
    place = {phase: 20 + index * _STEP for index, phase in enumerate(Phase)}
    parts = []
    for phase, nexts in NEXT.items():
        for following in (other for other in Phase if other in nexts):
            begin, end = place[phase] + _WIDTH, place[following]
            leap = (end - place[phase]) // _STEP
            if leap == 1:
                path = f"M{begin},{_TOP + 17} H{end - 3}"
            else:
                left, right = place[phase] + 70, end + 40
                path = (
                    f"M{left},{_TOP} C{left + 30},{_TOP - 24 * leap} {right - 30},{_TOP - 24 * leap} {right},{_TOP - 3}"
                )
            parts.append(f'<path d="{path}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>')
    for phase, x in place.items():
        parts.append(
            f'<rect x="{x}" y="{_TOP}" width="{_WIDTH}" height="34" rx="6" fill="none" stroke="currentColor"/>'
            f'<text x="{x + _WIDTH // 2}" y="{_TOP + 22}" text-anchor="middle" fill="currentColor">{phase.value}</text>'
        )
        ends = [outcome.value for outcome in Outcome if outcome in OUTCOMES[phase]]
        if ends:
            x += _WIDTH // 2
            parts.append(
                f'<path d="M{x},{_TOP + 34} v22" stroke="currentColor" stroke-dasharray="3 3" '
                'marker-end="url(#tip)" fill="none"/>'
            )
        parts += [
            f'<text x="{x}" y="{_TOP + 76 + 17 * number}" text-anchor="middle" fill="currentColor" font-size="13">'
            f"{end}</text>"
            for number, end in enumerate(ends)
        ]
    names = ", ".join(phase.value for phase in Phase)
    return "\n".join(
        [
            "```{raw} html",
            f'<svg viewBox="0 -10 760 240" role="img" aria-label="The phases of a request: {names}" '
            'style="max-width:100%;font-family:inherit;font-size:15px">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>',
            *parts,
            "</svg>",
            "```",
        ]
    )


def policies() -> str:
    """The disconnect policies, their values and defaults."""
    about = _attributes(DisconnectPolicy)
    hints = get_type_hints(DisconnectPolicy)
    return _table(
        ["policy", "values", "default", "meaning"],
        [
            [
                f"`{field.name}`",
                " ".join(f"`{value}`" for value in get_args(hints[field.name])),
                f"`{field.default}`",
                about[field.name],
            ]
            for field in attrs.fields(DisconnectPolicy)
        ],
    )


def options() -> str:
    """All options of the command, a table for each group of them."""
    hints = get_type_hints(Options, include_extras=True)
    groups: dict[str, list[Sequence[str]]] = {}
    for field in attrs.fields(Options):
        kind, parameter = get_args(hints[field.name])[:2]
        assert isinstance(parameter, Parameter)
        (group,) = parameter.group
        rows = groups.setdefault(group.name, [])
        if attrs.has(kind):
            inner = get_type_hints(kind)
            about = _attributes(kind)
            rows += [
                _option(item.name, item.default, inner[item.name], about[item.name]) for item in attrs.fields(kind)
            ]
        else:
            names = parameter.name or ()
            rows.append(_option(field.name, field.default, kind, _attributes(Options)[field.name], names))
    head = ["flag", "environment", "TOML key", "default", "meaning"]
    return "\n\n".join(f"**{group}**\n\n{_table(head, rows)}" for group, rows in groups.items())


def _option(name: str, default: Any, kind: Any, about: str, names: Sequence[str] = ()) -> Sequence[str]:
    key = name.replace("_", "-")
    flags = ", ".join(f"`{flag}`" for flag in names or [f"--{key}"])
    if kind is bool:
        flags += f", `--no-{key}`"
    if get_origin(kind) is Literal:
        about = f"{' or '.join(f'`{value}`' for value in get_args(kind))}: {about}"
    if default is None or default == ():
        shown = "–"
    else:
        shown = f"`{str(default).lower() if kind is bool else f'{default:g}' if kind is float else default}`"
    return [flags, f"`TRIO_INFER_{name.upper()}`", f"`{key}`", shown, about]


def datatypes() -> str:
    """The datatypes of the protocol."""
    return _table(
        ["on the wire", "in `config.pbtxt`", "in numpy", "bytes an element", "as JSON"],
        [
            [
                f"`{datatype.value}`",
                f"`{datatype.config_name}`",
                f"`{datatype.dtype.name}`{' of `bytes`' if datatype is Datatype.BYTES else ''}",
                str(datatype.itemsize) if datatype.itemsize else "4 + n",
                "yes" if datatype.in_json else "no, binary only",
            ]
            for datatype in Datatype
        ],
    )


_ENDPOINTS = {
    "/v2/health/live": "200, empty",
    "/v2/health/ready": "200, empty, if all models are ready; else 400; 503 while the server goes down",
    "/v2": "the server's name, version and extensions",
    "/v2/models/M": "the model's versions, inputs and outputs",
    "/v2/models/M/ready": "200, empty, or 400",
    "/v2/models/M/config": "the whole configuration, with what was left out filled in",
    "/v2/models/M/infer": "tensors in, tensors out; exactly one response",
    "/v2/models/M/generate": "plain JSON keys in and out; exactly one response",
    "/v2/models/M/stats": "what has been counted of the model: requests, failures, and how long each part took",
    "/v2/models/stats": "the same of all models",
    "/metrics": "metrics for Prometheus",
    "/v2/logging": "what is logged; POST changes it",
    "/v2/trace/setting": "what is traced; POST changes it",
    "/v2/models/M/trace/setting": "what is traced of one model; POST changes it",
    "/v2/models/M/cancel": "stops the requests of that model with a given id, and says how many those were",
    "/v2/models/M/generate_stream": "the same, each response a server-sent event; any number of them",
    "/v2/systemsharedmemory/status": "regions of [shared memory](shared-memory.md)",
    "/v2/systemsharedmemory/region/R/register": "registers one",
    "/v2/systemsharedmemory/unregister": "all of them, or one: `/v2/systemsharedmemory/region/R/unregister`",
    "/v2/cudasharedmemory/status": "none; as on a machine without a GPU",
}


def endpoints() -> str:
    """The paths that are served, with the methods that the router takes for each."""

    def row(path: str) -> Sequence[str]:
        route = find_route(path)
        assert route is not None
        return [" ".join(f"`{method}`" for method in route.methods), f"`{path}`", _ENDPOINTS[path]]

    return _table(["method", "path", "answer"], [row(path) for path in _ENDPOINTS])


def metrics() -> str:
    """The metrics of the server's own."""

    def row(name: str, kind: str, labels: Sequence[str], about: str, when: str) -> Sequence[str]:
        shown = " ".join(f"`{label}`" for label in labels) or "–"
        return [f"`{name}`", kind, shown, f"{about}{f' (with {when})' if when else ''}"]

    return _table(["metric", "kind", "labels", "what it says"], [row(*attrs.astuple(each)) for each in FAMILIES])


def promises() -> str:
    """Where a cancelled run ends, by what a runner promises."""
    return _table(["`stops`", "a cancelled run ends"], ([f"`{word}`", meaning] for word, meaning in PROMISES.items()))


def errors() -> str:
    """The codes that a model may choose, and their statuses."""
    return _table(["code", "status"], [[f"`{code.name}`", str(code.status)] for code in ErrorCode])


def features() -> str:
    """`docs/features.toml`, a table a section."""
    sections = tomllib.loads((Path(__file__).parent.parent / "features.toml").read_text())["section"]
    parts = []
    for section in sections:
        rows = []
        for row in section["row"]:
            files = dict.fromkeys(f"`{test.partition('::')[0].removeprefix('tests/')}`" for test in row["tests"])
            rows.append([row["id"], row["grade"], row["feature"], row["answer"], row["note"], ", ".join(files)])
        parts += [
            f"## {section['number']}. {section['title']}\n",
            _table(["", "grade", "feature", "here", "how, or why not", "shown by `tests/`"], rows),
            "",
        ]
    return "\n".join(parts)


GENERATED = {
    function.__name__: function
    for function in (
        datatypes,
        endpoints,
        errors,
        features,
        life,
        metrics,
        options,
        outcomes,
        phases,
        policies,
        promises,
        sights,
    )
}
