"""CSV files by column name, row by row."""

import csv
from collections.abc import Iterator, Sequence

from granikv.core.errors import TraceFormatError
from granikv.traces.readers.reading import Reading, open_text


def csv_rows(
    reading: Reading, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, ...]]:
    """The values of the named columns of each row; an absent optional column gives empty text.

    Raises:
        TraceFormatError: a column is missing, or a row is too short.
    """
    with open_text(reading.path) as lines:
        rows = csv.reader(lines)
        header = [name.strip() for name in next(rows, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise TraceFormatError(
                f"{reading.path} has no column {', '.join(missing)}; "
                "its first row must name the columns."
            )
        places = [header.index(name) if name in header else None for name in (*columns, *optional)]
        for reading.row, row in enumerate(rows, 2):
            if not row:
                continue
            try:
                yield tuple(["" if place is None else row[place] for place in places])
            except IndexError:
                raise reading.error(
                    "row", f"only {len(row)} columns", "repair or remove the row"
                ) from None


def tokens(reading: Reading, column: str, text: str) -> int:
    """A token count written as text.

    Raises:
        TraceFormatError: it is not an integer of at least 0.
    """
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise reading.error(column, f"want a token count, got {text!r}", "repair or remove the row")
    return value


def seconds(reading: Reading, column: str, text: str) -> float:
    """A time written as text, finite.

    Raises:
        TraceFormatError: it is not a finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise reading.error(column, f"want a time, got {text!r}", "repair or remove the row")
    return value
