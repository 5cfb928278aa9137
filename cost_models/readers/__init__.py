"""Reads measured rows: public tables and our own benchmarks."""
