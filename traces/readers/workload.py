"""Workload files: YAML of a `WorkloadSpec`, generated on the fly."""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.traces.generate import generate
from granikv.traces.readers.reading import Reading, Timed, open_text
from granikv.traces.spec import WorkloadSpec


def load_workload(path: Path) -> WorkloadSpec:
    """Read a workload file.

    Raises:
        ConfigError: it is not YAML or a field is wrong; the message names the first one.
    """
    try:
        with open_text(path) as file:
            return WorkloadSpec.model_validate(yaml.safe_load(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML ({error}); repair the file.") from None
    except ValidationError as error:
        problem = explain(error, WorkloadSpec)
        raise ConfigError(f"{path}, {problem}; see docs/traces.md for the fields.") from None


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a workload file, made with `ReadOptions.seed`."""
    reading.origin = 0.0
    options = reading.options
    for request in generate(load_workload(reading.path), options.seed):
        reading.report.rows_read += 1
        reading.report.kept += 1
        request.think_s = options.think_s(request.think_s)
        if not options.closed_loop:
            request.after, request.think_s = None, 0.0
        yield request.arrival_s, request
