"""Request streams: readers, generators, transforms, statistics, writers and run records."""

from granikv.traces.options import ReadOptions, ReadReport
from granikv.traces.request import Request, Run
from granikv.traces.source import TraceSource, open_trace

__all__ = ["ReadOptions", "ReadReport", "Request", "Run", "TraceSource", "open_trace"]
