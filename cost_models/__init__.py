"""Predicts step times: hardware, model shapes, roofline terms and their parameters."""
