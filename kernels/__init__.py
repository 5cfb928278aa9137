"""Triton attention over HOT slabs and COLD slots. Nothing is here yet: see the roadmap in the README."""
