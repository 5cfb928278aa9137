"""Workload files: YAML of a `WorkloadSpec` or a `PhasedSpec`, generated on the fly."""

from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from granikv.core.errors import ConfigError
from granikv.core.validation import explain
from granikv.traces.generate import generate
from granikv.traces.phases import generate_phases
from granikv.traces.readers.reading import Reading, Timed, open_text
from granikv.traces.request import Request
from granikv.traces.spec import PhasedSpec, WorkloadSpec


def load_workload(path: Path) -> WorkloadSpec | PhasedSpec:
    """Read a workload file; one with `phases` is a `PhasedSpec`.

    Raises:
        ConfigError: it is not YAML or a field is wrong; the message names the first one.
    """
    model: type[WorkloadSpec | PhasedSpec] = WorkloadSpec
    try:
        with open_text(path) as file:
            document = yaml.safe_load(file)
        if isinstance(document, dict) and "phases" in document:
            model = PhasedSpec
        return model.model_validate(document)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML ({error}); repair the file.") from None
    except ValidationError as error:
        problem = explain(error, model)
        raise ConfigError(f"{path}, {problem}; see docs/traces.md for the fields.") from None


def requests_of(spec: WorkloadSpec | PhasedSpec, seed: int) -> Iterator[Request]:
    """The requests of a workload file.

    Raises:
        ConfigError: a length table cannot be read.
    """
    return generate_phases(spec, seed) if isinstance(spec, PhasedSpec) else generate(spec, seed)


def read(reading: Reading) -> Iterator[Timed]:
    """Requests of a workload file, made with `ReadOptions.seed`."""
    reading.origin = 0.0
    options = reading.options
    for request in requests_of(load_workload(reading.path), options.seed):
        reading.report.rows_read += 1
        reading.report.kept += 1
        request.think_s = options.think_s(request.think_s)
        if not options.closed_loop:
            request.after, request.think_s = None, 0.0
        yield request.arrival_s, request
