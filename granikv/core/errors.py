"""Errors that a user can act on; API misuse raises ValueError or TypeError instead."""


class GraniKVError(Exception):
    """Base of every error that the command line shows as one sentence and exit code 1."""


class ConfigError(GraniKVError):
    """A setting, file or name that the user gave cannot be used."""


class TraceFormatError(GraniKVError):
    """A trace row that cannot be read; the message names file, row and field."""


class IntegrityError(GraniKVError):
    """A pool, directory or index broke its own invariant: a bug in GraniKV, never bad input."""
