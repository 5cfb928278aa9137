"""The decisions that the simulator and a live server share: pure, deterministic, integer code.

No torch, no clock, no randomness, no globals: time is an argument, and equal calls give equal
answers on every tensor-parallel rank.
"""
