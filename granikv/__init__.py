"""GraniKV: plan, simulate and serve a KV cache that is split into HOT slabs and COLD token slots."""

__version__ = "0.1.0"
