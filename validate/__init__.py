"""Simulated against live runs: so far the live engine's step times, the rest is on the roadmap."""
