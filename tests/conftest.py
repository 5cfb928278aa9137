"""Hypothesis runs the same examples each time; `--hypothesis-profile=search` looks for new ones."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("ci")
