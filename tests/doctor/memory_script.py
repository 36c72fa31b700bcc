"""Asks for more memory than its limit allows."""

import resource
from pathlib import Path

import torch

now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now_bytes + 2**28, now_bytes + 2**28))
torch.empty(2**33, dtype=torch.uint8)
