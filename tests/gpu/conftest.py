"""cuBLAS repeats its bits only where its workspace is fixed, before it starts."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
