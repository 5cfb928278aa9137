"""Telling trace formats apart by what a file holds: file names mislead."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import yaml

from granikv.core.errors import TraceFormatError
from granikv.traces.readers import canonical, plain
from granikv.traces.readers.reading import open_text
from granikv.traces.spec import WorkloadSpec

Format = Literal[
    "mooncake",
    "bailian",
    "azure",
    "burstgpt",
    "ragpulse",
    "weka",
    "vidur",
    "sharegpt",
    "bench_serving",
    "canonical",
    "plain",
    "workload",
]
FORMATS: tuple[Format, ...] = get_args(Format)

_HEAD_CHARS = 1 << 16


def detect(path: Path) -> Format:
    """The format of a trace file, or of a folder that holds one trace.

    Raises:
        TraceFormatError: there is nothing there, or it is no format that GraniKV reads.
    """
    if not path.exists():
        raise TraceFormatError(f"{path} does not exist; check the path.")
    found = _of_folder(path) if path.is_dir() else _of_file(path)
    if found is None:
        raise TraceFormatError(
            f"{path} is no trace that GraniKV knows; name its format: {', '.join(FORMATS)}."
        )
    return found


def _of_folder(path: Path) -> Format | None:
    formats = {_of_file(child) for child in path.iterdir() if child.is_file()} - {None}
    if len(formats) > 1 or not formats & {"weka", "ragpulse"}:
        raise TraceFormatError(
            f"{path} is a folder of {len(formats)} trace formats; name one file, or a folder "
            "with only Weka conversations or only the RAGPulse tables."
        )
    return formats.pop()


def _of_file(path: Path) -> Format | None:
    try:
        with open_text(path) as file:
            head = file.read(_HEAD_CHARS)
            start = head.lstrip()
            if start.startswith("{"):
                # A whole conversation or benchmark run may be one line of many MB.
                line = start.partition("\n")[0]
                if line == start:
                    line += file.readline()
                return _of_json(line, head)
    except TraceFormatError:
        return None  # not text: other files may lie in a trace's folder
    if start.startswith("["):
        return "sharegpt" if '"conversations"' in head else None
    return _of_csv(start.partition("\n")[0]) or _of_yaml(head)


def _of_json(line: str, head: str) -> Format | None:
    try:
        record = json.loads(line)
    except ValueError:
        # An object over several lines.
        return "weka" if '"requests"' in head and '"block_size"' in head else _of_yaml(head)
    return _of_keys(record) if isinstance(record, dict) else None


def _of_keys(record: Mapping[str, object]) -> Format | None:
    if record.get("format") == canonical.FORMAT:
        return "canonical"
    if isinstance(record.get("requests"), list) and "block_size" in record:
        return "weka"
    if record.keys() >= plain.KEYS:
        return "plain"
    if _is_workload(record):
        return "workload"
    if isinstance(record.get("hash_ids"), dict):
        return "ragpulse"
    if "chat_id" in record and "hash_ids" in record:
        return "bailian"
    if "input_length" in record and "output_length" in record:
        return "mooncake"
    if "completed" in record and "total_input_tokens" in record:
        return "bench_serving"
    return None


def _of_csv(line: str) -> Format | None:
    names = {name.strip() for name in next(csv.reader([line]), [])}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return "azure"
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        return "burstgpt"
    if {"num_prefill_tokens", "num_decode_tokens"} <= names:
        return "vidur"
    return None


def _of_yaml(head: str) -> Format | None:
    if not any(f"{name}:" in head for name in ("phases", *WorkloadSpec.model_fields)):
        return None
    try:
        document = yaml.safe_load(head)
    except yaml.YAMLError:
        return None
    return "workload" if isinstance(document, dict) and _is_workload(document) else None


def _is_workload(document: Mapping[str, object]) -> bool:
    """Two of its fields are enough, so that a misspelt third is reported as just that."""
    if isinstance(document.get("phases"), list):
        return True
    return len(document.keys() & WorkloadSpec.model_fields.keys()) >= 2
