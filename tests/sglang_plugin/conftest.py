"""Kernels of the plugin run in Triton's interpreter where there is no card, which must be chosen
before Triton is imported.
"""

import os

try:
    import torch
except ImportError:
    pass
else:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
