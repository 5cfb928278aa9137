"""Kernels and their measurements: libraries that GraniKV is compared with, timing, the sweep."""
