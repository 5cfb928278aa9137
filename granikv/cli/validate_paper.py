"""`granikv validate paper`: the paper's figures beside what the simulator predicts for them."""

from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.folders import make_folder
from granikv.cli.options import JobsOption
from granikv.cli.screen import progress_bar, results, say


def command(
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder for paper.json and paper.md; replaces them.")
    ] = None,
    jobs: JobsOption = None,
) -> None:
    """Print every figure known of the GraniKV paper beside the simulator's prediction.

    Simulates the paper's servers on its A100 with the shipped parameters; about a minute.
    """
    from granikv.cli.tables import paper_tables
    from granikv.validate.paper.answers import (
        Answer,
        compare,
        notes,
        predict_grid,
        questions,
        unsimulated,
        write,
    )

    if out is not None:
        make_folder(out)
    with progress_bar("Simulating the paper's settings") as bar:
        rows = compare(questions(), bar.advance_to, jobs)
        bar.stage("Simulating its grid")
        answer = Answer(rows, predict_grid(bar.advance_to, jobs))
    say(*notes())
    for table in paper_tables(answer):
        results().print(table)
    say(*unsimulated())
    if out is not None:
        say(f"Written: {', '.join(str(path) for path in write(answer, out))}")
