"""Stands for vLLM, of which SGLang takes one function where it finds no card: see `_custom_ops`."""
