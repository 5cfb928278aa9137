"""The peer on the same held-out shapes: `python -m granikv.cost_models.peer --out FILE.json`.

aiconfigurator-core interpolates the tables that our public rows were cut from, so on those rows it
only looks its answer up. Here it is asked twice: with its tables whole, and with the rows of each
fold's held-out shapes taken out of a copy of them, as our own fit is judged. It is no dependency:
install it beside this project (`pip install aiconfigurator-core==0.12.0`) to run this again.
"""

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources, util
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from granikv.cost_models.fit.held_out import folds_of, predict_held_out
from granikv.cost_models.fit.terms import Term, collect, fitted_terms, latency_of
from granikv.cost_models.hardware import load_hardware
from granikv.cost_models.ideal import Peaks
from granikv.cost_models.readers.own import read_own
from granikv.cost_models.readers.public import TABLES, cut_tables, sizes_of, table_paths, used_rows

_ROWS_PER_FOLD = 300  # of each term: a call of the peer takes about a millisecond
_SEED = 20261130
# What it adds to every prefill attention for the work around the kernel, taken off again: the rows
# are of the kernel alone. Read off its answers for rows that are in its tables.
_AROUND_EXTEND_MS = 0.0132

Ask = Callable[[dict[str, int]], float]


def main() -> None:
    """Compare and write the file that `granikv fit` shows beside its own errors."""
    parser = argparse.ArgumentParser(description="Compare aiconfigurator-core on held-out shapes.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    logging.disable(logging.WARNING)  # it warns at every call
    if util.find_spec("aiconfigurator_core") is None:
        print("aiconfigurator-core is not installed: pip install aiconfigurator-core==0.12.0.")
        return
    found = {gpu: compare(gpu) for gpu in TABLES}
    out.write_text(json.dumps({"peer": "aiconfigurator-core 0.12.0", "gpus": found}, indent=1))
    print(json.dumps(found, indent=1))


def compare(gpu: str) -> dict[str, dict[str, Any]]:
    """Errors of one GPU by term: the peer whole, the peer held out, and ours held out."""
    systems = Path(str(resources.files("aiconfigurator_core"))) / "systems"
    peaks = Peaks.of(load_hardware(gpu))
    found = {}
    for term in fitted_terms(gpu):
        with tempfile.TemporaryDirectory() as folder:
            cut_tables(systems, gpu, Path(folder))
            frame = pl.read_parquet(Path(folder) / f"{gpu}.{term.name}.parquet")
        if term.name == "gemm":
            frame = frame.filter(pl.col("m") <= 16384)
        found[term.name] = _compare_term(systems, gpu, term, frame, peaks)
    return found


def _compare_term(
    systems: Path, gpu: str, term: Term, frame: pl.DataFrame, peaks: Peaks
) -> dict[str, Any]:
    samples = collect(term, frame, read_own([]))
    assert samples is not None
    folds = {"folds": 64} if term.name == "all_reduce" else {}
    fold = folds_of(samples.shape, **folds)
    ideal = term.ideal(peaks, latency_of(samples))
    ours = predict_held_out(term.grid, samples, ideal, **folds)
    rng = np.random.default_rng(_SEED)
    chosen = []
    whole = np.full(len(fold), np.nan)
    held = np.full(len(fold), np.nan)
    for number in np.unique(fold):
        hidden = np.flatnonzero(fold == number)
        asked = rng.permutation(hidden)[:_ROWS_PER_FOLD]
        chosen.append(asked)
        for target, removed in ((whole, None), (held, frame[hidden])):
            with _database(systems, gpu, term.name, removed) as database:
                ask = _asker(database, term.name)
                for index in asked:
                    target[index] = _answer(ask, frame.row(int(index), named=True))
    rows = np.concatenate(chosen)
    return {
        "rows": len(rows),
        "answered": float(np.isfinite(held[rows]).mean()),
        "peer_with_its_rows": _errors(whole[rows], samples.time_ns[rows]),
        "peer_held_out": _errors(held[rows], samples.time_ns[rows]),
        "ours_held_out": _errors(ours[rows], samples.time_ns[rows]),
    }


def _errors(predicted_ns: np.ndarray, measured_ns: np.ndarray) -> dict[str, float] | None:
    answered = np.isfinite(predicted_ns)
    if not answered.any():
        return None
    error = np.abs(predicted_ns[answered] / measured_ns[answered] - 1)
    return {
        "median": round(float(np.median(error)), 4),
        "p90": round(float(np.quantile(error, 0.9)), 4),
    }


def _answer(ask: Ask, row: dict[str, int]) -> float:
    """The peer's time in ns; NaN where it refuses."""
    try:
        return ask(row) * 1e6
    except Exception:  # its refusals have no common class
        return float("nan")


@contextmanager
def _database(systems: Path, gpu: str, term: str, removed: pl.DataFrame | None) -> Iterator[Any]:
    """The peer over a copy of its tables without some rows, and without other kernels' rows."""
    from aiconfigurator_core.sdk.perf_database import (  # type: ignore[import-not-found,unused-ignore]
        get_database_view,
    )

    system, version = TABLES[gpu]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in systems.glob("*.yaml"):
            shutil.copy(path, root / path.name)
        for name, path in table_paths(systems, gpu).items():
            target = root / path.relative_to(systems)
            target.parent.mkdir(parents=True, exist_ok=True)
            for sidecar in path.parent.glob("*.yaml"):
                shutil.copy(sidecar, target.parent / sidecar.name)
            table = used_rows(pl.read_parquet(path), gpu, name)
            if removed is not None and name == term:
                table = _without(table, gpu, name, removed)
            table.write_parquet(target)
        database = get_database_view(
            system,
            "sglang",
            version,
            systems_paths=[folder],
            database_mode="SILICON",
            shared_layer=False,
            allow_unlisted_version=True,
        )
        yield database


def _without(table: pl.DataFrame, gpu: str, term: str, removed: pl.DataFrame) -> pl.DataFrame:
    sizes = sizes_of(term)
    keys = [name for name in removed.columns if name != "time_us"]
    marked = table.with_row_index("place").with_columns(
        table.select(*sizes).select(pl.all().name.prefix("key_"))
    )
    gone = marked.join(
        removed.select(keys).rename({name: f"key_{name}" for name in keys}),
        on=[f"key_{name}" for name in keys],
        how="semi",
    )
    return table.filter(~pl.Series(range(table.height)).is_in(gone["place"].to_list()))


def _asker(database: Any, term: str) -> Ask:
    from aiconfigurator_core.sdk import common  # type: ignore[import-not-found,unused-ignore]
    from aiconfigurator_core.sdk.operations import (  # type: ignore[import-not-found,unused-ignore]
        attention,
        communication,
        gemm,
    )

    kv, fmha = common.KVCacheQuantMode.bfloat16, common.FMHAQuantMode.bfloat16

    def ask(row: dict[str, int]) -> float:
        if term == "gemm":
            op = gemm.GEMM("", 1.0, row["n"], row["k"], common.GEMMQuantMode.bfloat16)
            return float(op._engine_query(database, x=row["m"]))
        if term == "all_reduce":
            op = communication.CustomAllReduce("", 1.0, row["bytes"] // 2, row["num_gpus"])
            return float(op._engine_query(database, x=1))
        heads = (row["num_q_heads"], row["num_kv_heads"])
        sizes = {"batch_size": row["rows"], "s": row["tokens"]}
        if term == "paged":
            op = attention.GenerationAttention("", 1.0, *heads, kv, head_size=row["head_dim"])
            return float(op._engine_query(database, **sizes))
        op = attention.ContextAttention("", 1.0, *heads, kv, fmha, head_size=row["head_dim"])
        return float(op._engine_query(database, **sizes)) - _AROUND_EXTEND_MS

    return ask


if __name__ == "__main__":
    main()
