"""`granikv validate`: live runs beside simulations of the same requests, rung by rung."""

import json
from pathlib import Path
from typing import Annotated

import typer

from granikv.cli.screen import progress_bar, results, say
from granikv.core.errors import ConfigError


def command(
    live: Annotated[
        list[Path],
        typer.Argument(help="Run-record folders (or folders of them), files of `bench serve`."),
    ],
    *,
    params: Annotated[
        str | None, typer.Option(help="Cost-model parameter file; the GPU's own by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for ladder.json and ladder.html.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(exists=True, help="An earlier ladder.json; fail where an error has grown."),
    ] = None,
) -> int:
    """Replay live runs through the simulator, and print how far it is off on each rung.

    Steps, schedule, requests, distributions, decisions. With --baseline the exit code is 1 where
    an error has grown by more than a tenth.
    """
    from granikv.cli.validate_tables import grown_table, ladder_tables
    from granikv.cost_models.params import load_params
    from granikv.validate.compare import ladder, page

    chosen = None if params is None else load_params(params)
    before = None if baseline is None else _figures(baseline)
    with progress_bar("Comparing, runs") as bar:
        found = ladder.climb(live, chosen, bar.advance_to)
    for table in ladder_tables(found):
        results().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ladder.json").write_text(json.dumps(ladder.to_json(found), indent=1) + "\n")
        page.write_page(found, out / "ladder.html")
        say(f"Written: {out / 'ladder.json'}, {out / 'ladder.html'}")
    if before is None:
        return 0
    now = ladder.figures(found)
    if not (both := now.keys() & before.keys()):
        raise ConfigError(f"{baseline} has no error that was measured here; compare other runs.")
    grown = ladder.grown(now, before)
    if grown:
        results().print(grown_table(grown))
        return 1
    say(f"None of {len(both)} errors has grown.")
    return 0


def _figures(baseline: Path) -> dict[str, float]:
    try:
        found = json.loads(baseline.read_text())["figures"]
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{baseline} is no ladder.json ({error!r}); make one with --out."
        ) from None
