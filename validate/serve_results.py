"""serve_results: the file of results, one JSON object a line, that a run may be resumed from."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from granikv.core.errors import ConfigError
from granikv.validate.drive import Drive

FORMAT = "granikv-serve-1"


class Results:
    """Results on disk, appended to line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All lines, in the order in which they were measured; none without a file.

        A last line without its end, as an interrupted run leaves it, is no row.

        Raises:
            ConfigError: a line is not of this format.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")[:-1]
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                is_ours = row["format"] == FORMAT
            except (ValueError, TypeError, KeyError):
                is_ours = False
            if not is_ours:
                raise ConfigError(
                    f"{self.path}, line {number} is not a result of granikv bench serve; "
                    "name another file."
                )
            rows.append(row)
        return rows

    def complete(self, identity: Mapping[str, Any]) -> set[tuple[str, str, str, int]]:
        """(variant, cell, settings, repeat) of what need not be measured again.

        `identity` is what must be equal: results of another model or seed do not count.
        """
        return {
            (row["variant"], row["cell"], settings_in(row), row["repeat"])
            for row in self.rows()
            if row["status"] == "complete"
            and all(row.get(name) == value for name, value in identity.items())
        }

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a line and see it onto the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        with self.path.open("a") as file:
            file.write(json.dumps({"format": FORMAT, **row}) + "\n")

    def keep_requests(self, drive: Drive, name: str) -> str:
        """Write the requests of a workload beside the results; returns the file's relative name.

        A file that is there stays: its name then gets a number.
        """
        folder = self.path.with_suffix(".requests")
        folder.mkdir(parents=True, exist_ok=True)
        file, number = folder / f"{name}.jsonl", 1
        while file.exists():
            number += 1
            file = folder / f"{name}-{number}.jsonl"
        file.write_text("".join(json.dumps(record.row()) + "\n" for record in drive.records))
        return f"{folder.name}/{file.name}"


def settings_in(row: Mapping[str, Any]) -> str:
    """A result's settings; results of before there were any have none."""
    settings: str = row.get("settings", "{}")
    return settings


def requests_name(row: Mapping[str, Any]) -> str:
    """The name of the requests of a result: variant, cell, what it was given, repeat."""
    given = json.loads(row["settings"]) | json.loads(row["engine"])
    text = ",".join(f"{name}={value}" for name, value in given.items())
    parts = (row["variant"], row["cell"], re.sub(r"[^\w=.,-]+", "_", text), str(row["repeat"]))
    return ".".join(part for part in parts if part)


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
