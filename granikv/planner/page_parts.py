"""page_parts: what every page of results is made of - one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template

import plotly.graph_objects as go

from granikv import __version__

_MOST_COLUMNS = 3
_CONFIG = {"displayModeBar": False, "responsive": True}

# Headers, and the cells of each row by its name.
Table = tuple[tuple[str, ...], dict[str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Section:
    """Figures side by side, by caption."""

    title: str
    note: str
    figures: Mapping[str, go.Figure]


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on a page, as plain text and figures.

    Attributes:
        title: which command it is of.
        subject: what was asked about.
        is_partial: whether an interrupt left simulations out.
        sentences: the answer, most important first.
        cards: numbers of the answer, by what they are.
        best: name of the row that the answer recommends.
        parameters: every parameter of the cost model.
    """

    title: str
    subject: str
    is_partial: bool
    sentences: Sequence[str]
    cards: Mapping[str, str]
    table: Table
    best: str
    sections: Sequence[Section]
    assumptions: Mapping[str, str] = field(default_factory=dict)
    parameters: Table = ((), {})

    def write(self, path: Path) -> None:
        """Write the file; it needs nothing else: plotly.js is inside."""
        path.write_text(self._html(), encoding="utf-8")

    def _html(self) -> str:
        return _PAGE.substitute(
            title=escape(self.title),
            subject=escape(self.subject),
            warning=_WARNING if self.is_partial else "",
            cards="".join(
                f"<div><b>{escape(value)}</b>{escape(name)}</div>"
                for name, value in self.cards.items()
            ),
            sentences="".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences),
            table=_table(self.table, self.best),
            figures=_figures(self.sections),
            assumptions="".join(
                f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in self.assumptions.items()
            ),
            parameters=_table(self.parameters),
            version=escape(__version__),
        )


def _figures(sections: Sequence[Section]) -> str:
    """All figures as HTML; plotly.js comes with the first one."""
    parts, is_first = [], True
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2><p class=note>{escape(section.note)}</p>")
        # The number of columns is fixed before the scripts run: they measure their own width once.
        columns = len(section.figures) if len(section.figures) <= _MOST_COLUMNS else 2
        parts.append(f"<div class='grid of{columns}'>")
        for name, figure in section.figures.items():
            html = figure.to_html(_CONFIG, full_html=False, include_plotlyjs=is_first)
            is_first = False
            parts.append(f"<figure><figcaption>{escape(name)}</figcaption>{html}</figure>")
        parts.append("</div>")
    return "".join(parts)


def _table(table: Table, best: str = "") -> str:
    headers, rows = table
    head = "".join(f"<th>{escape(header)}" for header in headers)
    body = "".join(
        f"<tr{' class=best' if name == best else ''}>"
        + "".join(f"<td>{escape(cell)}" for cell in (name, *cells))
        for name, cells in rows.items()
    )
    return f"<div class=scroll><table><tr>{head}{body}</table></div>"


_WARNING = "<p class=warning>Interrupted: some simulations are missing.</p>"
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GraniKV $title: $subject</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; background: #f9fafb; margin: 0 }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px }
h1 { font-size: 15px; font-weight: 600; color: #6b7280; margin: 0 0 12px }
h2 { font-size: 20px; margin: 40px 0 4px }
.note, dt, footer { color: #6b7280 }
.answer { background: #fff; border-left: 5px solid #2563eb; padding: 12px 20px; border-radius: 6px }
.answer p { margin: 6px 0 } .answer p:first-child { font-size: 19px; font-weight: 600 }
.warning { background: #fef3c7; padding: 8px 16px; border-radius: 6px }
.cards, .grid { display: grid; gap: 12px; margin: 16px 0 }
.cards { grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)) }
@media (min-width: 760px) { .of2 { grid-template-columns: 1fr 1fr } }
@media (min-width: 1000px) { .of3 { grid-template-columns: 1fr 1fr 1fr } }
.cards div { background: #fff; padding: 12px 16px; border-radius: 6px; color: #6b7280 }
.cards b { display: block; font-size: 15px; color: #1f2937 }
.scroll { overflow-x: auto; background: #fff; border-radius: 6px }
table { border-collapse: collapse; width: 100%; font: 14px/1.4 system-ui, sans-serif }
td { white-space: nowrap }
th, td { padding: 7px 12px; text-align: right; border-bottom: 1px solid #e5e7eb }
td:first-child, th:first-child { text-align: left } th { font-weight: 600; vertical-align: bottom }
.best { background: #dbeafe; font-weight: 600 }
figure { margin: 0; background: #fff; border-radius: 6px; padding: 8px; min-width: 0 }
figcaption { font-weight: 600; font-size: 14px; padding: 2px 8px }
dl { background: #fff; border-radius: 6px; padding: 12px 20px; margin: 8px 0 }
dt { font-size: 14px; margin-top: 8px } dd { margin: 0 }
details td, details th { text-align: left; white-space: normal }
</style></head><body><main>
<h1>GraniKV $title: $subject</h1>
$warning<div class="answer">$sentences</div>
<div class="cards">$cards</div>
$table
$figures
<h2>Assumptions</h2><dl>$assumptions</dl>
<details><summary>Every parameter of the cost model, with its origin</summary>$parameters</details>
<footer>Simulated by GraniKV $version; nothing here was measured on a server.</footer>
</main></body></html>
""")
