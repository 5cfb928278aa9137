"""paper: the published figures beside what the simulator predicts for them, as rows and as text."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from granikv.validate.paper.claims import CAVEAT, CLAIMS, NOT_SIMULATED, PAPER, Claim, in_unit
from granikv.validate.paper.kernels import kernel_questions
from granikv.validate.paper.outcomes import Question, gain
from granikv.validate.paper.runs import capacity, run_cells, step_cost
from granikv.validate.paper.serving import (
    GRID_PREFIXES,
    GRID_ROWS,
    grid_cells,
    serving_questions,
)
from granikv.validate.paper.settings import CONFIGURATIONS, CUT, GPU, MEANS, Cell, Served

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One claim in one setting.

    Attributes:
        mean_rows: decode rows of each run behind it, in order, on average over its steps.
    """

    claim: Claim
    setting: str
    prediction: float
    mean_rows: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Prediction / claim."""
        return self.claim.ratio(self.prediction)

    @property
    def words(self) -> tuple[str, ...]:
        """A cell for each of `HEADERS`."""
        claim = self.claim
        return (
            claim.place,
            claim.text,
            claim.words(),
            self.setting,
            in_unit(self.prediction, claim.unit),
            f"{self.ratio:.2f}",
            _range_words(self.mean_rows),
            "input" if claim.is_input else "",
        )


HEADERS = ("where", "claim", "published", "setting", "predicted", "ratio", "rows", "basis")


@dataclass(frozen=True, slots=True)
class GridLine:
    """Predicted gains over stock of one model and prefix of the synthetic grid, by batch size."""

    model: str
    prefix_tokens: int
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """All that the command found."""

    rows: tuple[Row, ...]
    grid: tuple[GridLine, ...]


def questions() -> list[Question]:
    """All questions, in the order of the claims."""
    place = {claim.id: number for number, claim in enumerate(CLAIMS)}
    return sorted((*kernel_questions(), *serving_questions()), key=lambda q: place[q.claim])


def compare(
    asked: Sequence[Question], on_progress: Progress, jobs: int | None = None
) -> tuple[Row, ...]:
    """Simulate every cell of some questions once, and answer them in order."""
    cells = list(dict.fromkeys(cell for question in asked for cell in question.cells))
    found = run_cells(cells, on_progress, jobs)
    claims = {claim.id: claim for claim in CLAIMS}
    rows = []
    for question in asked:
        outcomes = [found[cell] for cell in question.cells]
        means = tuple(round(outcome.mean_rows, 1) for outcome in outcomes)
        rows.append(Row(claims[question.claim], question.setting, question.value(outcomes), means))
    return tuple(rows)


def predict_grid(on_progress: Progress, jobs: int | None = None) -> tuple[GridLine, ...]:
    """The synthetic grid, for which no figures are known."""
    lines = [(served, prefix) for served in CONFIGURATIONS for prefix in GRID_PREFIXES]
    points = {line: [grid_cells(*line, rows) for rows in GRID_ROWS] for line in lines}
    cells: list[Cell] = [cell for pairs in points.values() for pair in pairs for cell in pair]
    found = run_cells(cells, on_progress, jobs)
    return tuple(
        GridLine(
            served.name,
            prefix,
            tuple(gain([found[cell] for cell in pair]) for pair in points[served, prefix]),
        )
        for served, prefix in lines
    )


def notes() -> tuple[str, ...]:
    """What every row rests on."""
    return (
        *CAVEAT,
        f"GPU {GPU}: {step_cost(CONFIGURATIONS[0]).params.note}",
        *(f'Lengths "{lengths.name}": {lengths.origin}.' for lengths in (CUT, MEANS)),
        'Rows: decode rows of the runs, on average. Basis "input": a parameter was set from this '
        "figure. Two launches: never a fused one; none is known of the paper's engine.",
        *(f"KV capacity of {served.name}: {_capacity(served)}" for served in CONFIGURATIONS),
    )


def unsimulated() -> tuple[str, ...]:
    """A sentence for each figure that is not simulated."""
    return tuple(
        f"{claim.place}: {claim.text}: not simulated, because {claim.reason}."
        for claim in NOT_SIMULATED
    )


def _range_words(values: Sequence[float]) -> str:
    low, high = (f"{value:.0f}" for value in (min(values), max(values))) if values else ("", "")
    return low if low == high else f"{low}-{high}"


def _capacity(served: Served) -> str:
    found = capacity(served)
    return (
        f"{found.size_tokens:,} tokens, by SGLang's memory rule at mem_fraction_static "
        f"{found.mem_fraction_static:g}."
    )


def markdown(answer: Answer) -> str:
    """The whole answer as Markdown."""
    rows = _markdown_table(HEADERS, [row.words for row in answer.rows])
    headers = ("model", "prefix", *(f"B = {rows}" for rows in GRID_ROWS))
    grid = _markdown_table(headers, [grid_words(line) for line in answer.grid])
    return "\n\n".join(
        (
            f"# {PAPER} beside the simulator",
            "\n".join(f"- {note}" for note in notes()),
            rows,
            "\n".join(f"- {line}" for line in unsimulated()),
            "Predicted gain over stock on the synthetic grid:",
            grid + "\n",
        )
    )


def grid_words(line: GridLine) -> tuple[str, ...]:
    """A line of the grid as tables show it."""
    return line.model, f"{line.prefix_tokens:,}", *(in_unit(value, "x") for value in line.gains)


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(answer: Answer, folder: Path) -> tuple[Path, Path]:
    """Write paper.json and paper.md into a folder that exists."""
    body = {
        "format": "granikv-paper-1",
        "notes": notes(),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in answer.rows],
        "not_simulated": [asdict(claim) for claim in NOT_SIMULATED],
        "grid_rows": GRID_ROWS,
        "grid": [asdict(line) for line in answer.grid],
    }
    paths = folder / "paper.json", folder / "paper.md"
    paths[0].write_text(json.dumps(body, indent=1) + "\n")
    paths[1].write_text(markdown(answer))
    return paths
