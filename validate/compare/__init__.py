"""Simulated runs against live ones: the same requests, error by error."""
