"""The report as a page: one file without scripts or outside references, readable, and printable."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib import resources

from lmcache_core_conformance.figures import amount
from lmcache_core_conformance.report import MeasuredFigure, PropertyResult, ReportDocument
from lmcache_core_conformance.verdicts import Verdict

_LEGEND = {
    Verdict.PASSED: "the property was tried and held",
    Verdict.FAILED: "it did not hold",
    Verdict.UNPROVEN: "not tried: the harness lacks a hook, or the capabilities are ill-declared",
    Verdict.DEVIATION: "it does not hold, and the backend's author says so, with the reason",
    Verdict.NOT_APPLICABLE: "the capability named makes it meaningless for this backend",
}
_ORDER = (Verdict.PASSED, Verdict.FAILED, Verdict.UNPROVEN, Verdict.DEVIATION, Verdict.NOT_APPLICABLE)
_METER_TOP = 1.5
"""The ratio at which a meter is full."""

TITLE = "conformance report"
"""Ends every page's title, by which the page of an earlier run is known."""


def render(document: ReportDocument) -> str:
    """The whole page."""
    title = f"{document.backend.name}: {TITLE}"
    css = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(
        part
        for part in (
            _header(document),
            _facts(document),
            "<h2>Capabilities</h2>",
            _capabilities(document),
            _performance(document.figures),
            "<h2>Properties</h2>",
            *(_group(name, results) for name, results in document.groups.items()),
            _footer(document),
        )
        if part
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def headline(document: ReportDocument) -> tuple[Verdict, str]:
    """What the report says as a whole, and the verdict that colours it."""
    failed, unproven = len(document.of(Verdict.FAILED)), len(document.of(Verdict.UNPROVEN))
    deviations = len(document.of(Verdict.DEVIATION))
    partial = "" if document.suite.complete else " Only part of the suite was run."
    if document.interrupted:
        partial = " The run was interrupted before its end."
    if failed:
        return Verdict.FAILED, f"{_count(failed, 'property', 'properties')} failed.{partial}"
    if unproven:
        return Verdict.UNPROVEN, f"Nothing failed, but {unproven} could not be tried.{partial}"
    if deviations:
        return Verdict.DEVIATION, f"Passed, with {_count(deviations, 'listed deviation')}.{partial}"
    slow = sum(result.below_floor for result in document.results)
    below = f" {_count(slow, 'property', 'properties')} below the floor of its speed." if slow else ""
    if partial:
        return Verdict.UNPROVEN, f"What was run passed.{below}{partial}"
    tone = Verdict.UNPROVEN if slow else Verdict.PASSED
    return tone, f"Passed every property that applies to it.{below}"


def _header(document: ReportDocument) -> str:
    backend, (tone, text) = document.backend, headline(document)
    came_with = (
        f"{backend.distribution} {backend.version}" if backend.distribution else backend.implementation
    )
    present = [verdict for verdict in _ORDER if document.of(verdict)]
    counts = "".join(
        f'<span class="{_css(verdict)}" title="{escape(_LEGEND[verdict])}">'
        f"<b>{len(document.of(verdict))}</b>{verdict.value}</span>"
        for verdict in present
    )
    bar = "".join(
        f'<i class="{_css(verdict)}" style="flex:{len(document.of(verdict))}"></i>' for verdict in present
    )
    return (
        f'<header class="card {_css(tone)}"><p class="over">Conformance report</p>'
        f'<h1>{escape(backend.name)}</h1><p class="soft">{escape(came_with)}</p>'
        f'<p class="headline">{escape(text)}</p><div class="counts">{counts}</div>'
        f'<div class="bar" role="presentation">{bar}</div></header>'
    )


def _facts(document: ReportDocument) -> str:
    backend, suite, where = document.backend, document.suite, document.environment
    certified = [
        ("implementation", _code(backend.implementation)),
        ("distribution", escape(f"{backend.distribution} {backend.version}".strip() or "none")),
        ("contract", f"{backend.api[0]}.{backend.api[1]}"),
        *((name, escape(_shown(value))) for name, value in backend.options.items()),
    ]
    run = [
        ("lmcache-core", f"{escape(suite.core)}, contract {suite.api[0]}.{suite.api[1]}"),
        ("suite", escape(suite.version)),
        ("started", escape(document.started.replace("T", " ").replace("+00:00", " UTC"))),
        ("took", f"{document.seconds:.0f} s"),
        ("effort", _effort(document)),
    ]
    environment = [
        ("Python", escape(where.python)),
        ("system", escape(f"{where.system}, {where.machine}")),
        ("processor", escape(f"{where.processors} × {where.processor or where.machine}")),
        ("memory", f"{where.memory_bytes / (1 << 30):.0f} GiB"),
        ("file system", escape(where.file_system or "unknown")),
    ]
    cards = (("Backend", certified), ("Run", run), ("Environment", environment))
    return f'<div class="facts">{"".join(_card(title, rows) for title, rows in cards)}</div>'


def _card(title: str, rows: Iterable[tuple[str, str]]) -> str:
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in rows)
    return f'<section class="card"><h3>{escape(title)}</h3><dl>{listed}</dl></section>'


def _effort(document: ReportDocument) -> str:
    names = document.suite.reduced
    return f"reduced: {escape(', '.join(names))}" if names else "the suite's default"


def _capabilities(document: ReportDocument) -> str:
    chips = []
    for name, value in document.capabilities.items():
        words = name.replace("_", " ")
        if isinstance(value, bool):
            chips.append((words, "on" if value else "off"))
        else:
            chips.append((f"{words}: {_shown(value)}", "value"))
    chips += [(protocol, "on") for protocol in document.backend.protocols]
    rows = "".join(f'<span class="chip {kind}">{escape(text)}</span>' for text, kind in chips)
    return f'<div class="card chips">{rows}</div>'


def _performance(figures: tuple[MeasuredFigure, ...]) -> str:
    if not figures:
        return ""
    enforced = "Floors were enforced." if any(f.enforced for f in figures) else "Floors were not enforced."
    rows = "".join(_figure(figure) for figure in figures)
    return (
        "<h2>Performance</h2>"
        '<p class="soft">Each figure was timed in turn with its baseline, in the same run. The ratio is the '
        f"median over the rounds, with its quartiles; the mark on the bar is the floor. {enforced}</p>"
        '<div class="card figures"><table><thead><tr><th>what</th><th class="right">measured</th>'
        '<th>baseline</th><th class="right">measured</th><th class="right">ratio</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _figure(figure: MeasuredFigure) -> str:
    below = figure.ratio < figure.floor
    tone = _css((Verdict.FAILED if figure.enforced else Verdict.UNPROVEN) if below else Verdict.PASSED)
    return (
        f"<tr><td>{escape(figure.name)}</td>"
        f'<td class="right number">{amount(figure.value)} {escape(figure.unit)}</td>'
        f"<td>{escape(figure.baseline)}</td>"
        f'<td class="right number">{amount(figure.baseline_value)} {escape(figure.unit)}</td>'
        f'<td class="right"><b class="number">{figure.ratio:.2f}</b>'
        f'<br><span class="soft number">{figure.low:.2f}–{figure.high:.2f}</span></td>'
        f'<td class="{tone}"><div class="meter" role="presentation">'
        f'<i style="width:{_percent(figure.ratio)}"></i><b style="left:{_percent(figure.floor)}"></b>'
        "</div></td></tr>"
    )


def _group(name: str, results: tuple[PropertyResult, ...]) -> str:
    seen = [sum(result.verdict is verdict for result in results) for verdict in _ORDER]
    counts = ", ".join(f"{n} {verdict.value}" for n, verdict in zip(seen, _ORDER, strict=True) if n)
    rows = "".join(_property(result) for result in results)
    return (
        f'<section class="card group"><div><h3>{escape(name.replace("-", " ").capitalize())}</h3>'
        f'<span class="soft">{counts}</span></div>'
        f"<table><tbody>{rows}</tbody></table></section>"
    )


def _property(result: PropertyResult) -> str:
    sentence = result.sentence[:1].upper() + result.sentence[1:]
    detail = f'<div class="detail">{escape(result.detail)}</div>' if result.detail else ""
    css = _css(Verdict.UNPROVEN if result.below_floor else result.verdict)
    return (
        f'<tr class="{css}" id="{escape(result.name)}"><td class="verdict">'
        f'<span class="badge">{result.said}</span></td>'
        f'<td>{escape(sentence)}.<div class="why">{_prose(result.why)}</div>{detail}</td>'
        f'<td class="right soft number">{result.seconds:.2f} s</td></tr>'
    )


def _footer(document: ReportDocument) -> str:
    legend = "; ".join(f"{verdict.value}: {_LEGEND[verdict]}" for verdict in _ORDER if document.of(verdict))
    return f"<footer><p>{escape(legend[:1].upper() + legend[1:])}.</p></footer>"


def _css(verdict: Verdict) -> str:
    return verdict.value.replace(" ", "-")


def _code(text: str) -> str:
    """An identifier that may break after a dot, a colon or an underscore, and nowhere else."""
    return "<code>" + re.sub(r"([.:_])", r"\1<wbr>", escape(text)) + "</code>"


def _prose(text: str) -> str:
    """A sentence in which `this` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _percent(ratio: float) -> str:
    return f"{min(ratio / _METER_TOP, 1) * 100:.1f}%"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
