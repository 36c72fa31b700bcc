"""Training on a machine that has no GPU and no C++ compiler."""

from __future__ import annotations

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops

SHARED_MEMORY_COLLECTIVES = "deepspeed_shm_comm"


def skip_cpu_extension_builds() -> bool:
    """Keep DeepSpeed from compiling its shared-memory collectives when the accelerator is the CPU.

    Call it before `deepspeed.initialize` or `deepspeed.init_distributed`. On a CPU these build a C++
    extension first, which takes half a minute and ends the run where there is no compiler; without it gloo
    carries all collectives. An extension that was built when DeepSpeed was installed is left in use.
    For an optimizer that needs no compiler either, give Adam `"torch_adam": true` in the ds_config.

    Returns:
        Whether the build was switched off; False, with nothing changed, on any other accelerator.
    """
    if get_accelerator().device_name() != "cpu" or installed_ops.get(SHARED_MEMORY_COLLECTIVES):
        return False
    # DeepSpeed asks this table before it loads the extension (comm/torch.py, build_shm_op).
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_COLLECTIVES] = False
    return True
