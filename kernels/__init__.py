"""Decode attention over shared prefixes, what it is compared with, and how both are measured."""
