"""A job that only talks over gloo: `gloo_script.py RANK SIGNAL` ends that rank by that signal."""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist

rank_to_end, number = (int(argument) for argument in sys.argv[-2:])
# DeepSpeed looks once a second, and of two ranks that have ended reports any: survivors take their time.
atexit.register(time.sleep, 2.5)
dist.init_process_group("gloo")
value = torch.ones(1)
for step in range(100):
    dist.all_reduce(value)
    if step == 3 and dist.get_rank() == rank_to_end:
        os.kill(os.getpid(), number)
        time.sleep(30)
    time.sleep(0.05)
