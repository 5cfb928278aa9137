"""Turns measured rows into a parameter file; the only writer of parameters."""
