"""How each launcher carries the lines of a `.deepspeed_env` to the ranks.

There are two ways to Slurm. DeepSpeed's own launcher puts the lines into `srun --export`, which ends values
at commas. The script that gen-launch writes sets the variables in its own shell, and `srun` hands on all.
"""

from __future__ import annotations

from enum import Enum


class Launcher(str, Enum):
    """The program that starts the ranks, by the name that `deepspeed --launcher` gives it."""

    PDSH = "pdsh"
    OPENMPI = "openmpi"
    MPICH = "mpich"
    IMPI = "impi"
    SLURM = "slurm"
    TORCHRUN = "torchrun"

    @property
    def reads_env_file(self) -> bool:
        """Whether it goes through DeepSpeed's launcher, which alone knows the file."""
        return self is not Launcher.TORCHRUN

    @property
    def script_sets_variables(self) -> bool:
        """Whether gen-launch's script reads the file itself, in its shell, and not DeepSpeed's launcher."""
        return self in (Launcher.SLURM, Launcher.TORCHRUN)

    @property
    def has_a_shell(self) -> bool:
        """Whether lines become `export` commands of a remote shell; else they are arguments as they are."""
        return self is Launcher.PDSH
