"""Simulated against live runs. Nothing is here yet: see the roadmap in the README."""
