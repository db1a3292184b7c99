"""Tests of Triton kernels under its interpreter, in a process of their own: test_kernels_gpu.py starts it."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
