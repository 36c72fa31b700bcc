"""Saves at ZeRO-3, or loads what was saved: `resume_worker.py save|load DIR`."""

import sys

import deepspeed
import torch

import ds_toolkit

ds_toolkit.skip_cpu_extension_builds()
mode, directory = sys.argv[-2:]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
if mode == "save":
    engine.save_checkpoint(directory, tag="first")
else:
    engine.load_checkpoint(directory, tag="first")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
