"""GraniKV: plan, simulate and serve a KV cache of HOT slabs and COLD token slots."""

__version__ = "0.1.0"
