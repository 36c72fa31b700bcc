"""DS1201 to DS1229: ends by a signal or an exit code, told apart by what else was seen."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature

ENDS = (
    Signature(
        "DS1201",
        "host-out-of-memory",
        "the kernel ended process {pid} ({program}) because the host had no memory left",
        "start fewer DataLoader workers, give the job more memory, or offload less;"
        " `ds-toolkit plan memory` counts what a host needs",
        (
            r"(?<!cgroup )[Oo]ut of memory: Kill(?:ed)? process (?P<pid>\d+)"
            r" \((?P<program>[^)]*)\)",
            r"oom-kill:constraint=CONSTRAINT_NONE.*task=(?P<program>[^,]*),pid=(?P<pid>\d+)",
            r"invoked oom-killer:(?!.*MEMCG)",
        ),
        unless=("cgroup-out-of-memory",),
    ),
    Signature(
        "DS1202",
        "cgroup-out-of-memory",
        "the job went over the memory limit of its control group (container or Slurm"
        " allocation) and was killed",
        "ask for more (`--mem` of Slurm, the memory limit of the container), or need less:"
        " start fewer DataLoader workers, give the job more memory, or offload less;"
        " `ds-toolkit plan memory` counts what a host needs",
        (
            r"[Mm]emory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d+)",
            r"oom-kill:constraint=CONSTRAINT_MEMCG.*pid=(?P<pid>\d+)",
            r"[Dd]etected \d+ oom[_-]kill event",
            r"task (?P<rank>\d+): Out Of Memory",
            r"OOMKilled|OUT_OF_MEMORY|oom_kill \d+ more",
        ),
    ),
    Signature(
        "DS1203",
        "allocation-refused",
        "host memory was refused to a process: a limit (`ulimit -v`), or the kernel hands"
        " out no more than there is",
        "look at `ulimit -a` on the node where it failed, and at `vm.overcommit_memory`;"
        " start fewer DataLoader workers, give the job more memory, or offload less;"
        " `ds-toolkit plan memory` counts what a host needs",
        (
            r"^MemoryError\b",
            r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory",
            r"(?:erminate called|rror|xception).*std::bad_alloc",
            r"\[Errno 12\] Cannot allocate memory",
            r"numpy.*ArrayMemoryError|_ArrayMemoryError",
        ),
    ),
    Signature(
        "DS1204",
        "killed-without-a-word",
        "a rank was killed (SIGKILL) and nothing in these logs says by whom; by far the"
        " most frequent killer is the kernel when host memory runs out",
        "look into the kernel's log of that node: `dmesg -T | grep -i -E 'killed"
        " process|oom'`, or `sacct -j JOB --format=State,ExitCode,MaxRSS`; give its text"
        " to `ds-toolkit diagnose` beside this one",
        needs=("exit:SIGKILL",),
        unless=("preempted", "time-limit", "node-failed"),
        confidence=Confidence.LIKELY,
        is_fallback=True,
    ),
    Signature(
        "DS1205",
        "shared-memory-full",
        "no room is left in /dev/shm: DataLoader workers, NCCL, gloo and snapshots keep their buffers there",
        "enlarge it (`docker run --shm-size=16g` or `--ipc=host`, an emptyDir of medium"
        " Memory in Kubernetes), start fewer workers, and remove what killed runs left"
        " (`ls /dev/shm`)",
        (
            r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error",
            r"insufficient shared memory \(shm\)|out of shared memory",
            r"(?:unable to (?:write to|open|mmap)[^/]*|o space left on device.*)(?:</torch_"
            r"|/dev/shm)",
            r"rror while (?:creating|attaching to) shared memory segment /dev/shm",
            r"[(</]dev/shm.*o space left on device",
        ),
    ),
    Signature(
        "DS1206",
        "bus-error-without-a-word",
        "a rank ended by SIGBUS: memory that a file stands for could not be had; mostly"
        " /dev/shm is full, else a mapped file was cut while it was in use",
        "look at `df -h /dev/shm` on that node while the job runs; start containers with a"
        " larger `--shm-size`",
        needs=("exit:SIGBUS",),
        confidence=Confidence.LIKELY,
        is_fallback=True,
    ),
    Signature(
        "DS1208",
        "cpp-assertion",
        "compiled code gave up by itself: {what}",
        "what it says is the cause; look for it in the issues of the library that is"
        " named. If nothing explains it, rebuild the extensions against this torch (remove"
        " ~/.cache/torch_extensions)",
        (
            r"""(?P<what>Assertion [`'\"].*ailed\.?)""",
            r"terminate called after throwing an instance of"
            r" (?P<what>'(?!c10::DistBackendError|std::bad_alloc).*')",
        ),
        unless=("nccl-timeout", "device-side-assert", "gpu-out-of-memory", "allocation-refused"),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1209",
        "device-side-assert",
        "a kernel on the GPU refused its input: most often a token or label that is not"
        " below the size of the embedding or of the classes",
        "run once with CUDA_LAUNCH_BLOCKING=1, or one batch on the CPU, to see the line;"
        " compare the tokenizer's length with the vocabulary size of the model",
        (
            r"CUDA error: device-side assert triggered",
            r"[Aa]ssertion `.*(?:index out of bounds|< n_classes|srcIndex <).*` ?failed",
        ),
    ),
    Signature(
        "DS1210",
        "aborted-without-a-word",
        "a rank ended by SIGABRT: compiled code gave up, and these logs do not hold what it said",
        "look at the standard error of that rank (`deepspeed --enable_each_rank_log DIR`,"
        " `torchrun --log-dir DIR --redirects 3`), and set TORCH_CPP_LOG_LEVEL=INFO and"
        " NCCL_DEBUG=INFO for the next run",
        needs=("exit:SIGABRT",),
        unless=("abort-at-exit",),
        confidence=Confidence.POSSIBLE,
        is_fallback=True,
    ),
    Signature(
        "DS1211",
        "abort-at-exit",
        "a rank aborted while its interpreter ended, after its work: a thread of the"
        " process group was still alive",
        "end the script with `torch.distributed.barrier();"
        " torch.distributed.destroy_process_group()`; check whether the last checkpoint is"
        " whole (`ds-toolkit verify`)",
        (r"terminate called without an active exception",),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1212",
        "mixed-builds",
        "compiled parts that do not belong together: an extension, torch, CUDA or the C++"
        " library is of another build",
        "remove ~/.cache/torch_extensions, reinstall torch and DeepSpeed into one fresh"
        " environment with the same CUDA, and compare `ds_report` on all nodes",
        (
            r"ImportError: .*undefined symbol: (?P<symbol>\w+)",
            r"version `(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+' not found",
            r"rror.*no kernel image is available",
            r"rror.*CUDA driver version is insufficient|xception: Installed CUDA version .*"
            r" does not match",
            r"rror: .*(?:\.so[.\d]*): cannot open shared object file",
        ),
    ),
    Signature(
        "DS1213",
        "segmentation-fault",
        "a rank read memory that is not its own (SIGSEGV); most often compiled parts of"
        " different builds are mixed",
        "run with PYTHONFAULTHANDLER=1 to see the Python line; then remove"
        " ~/.cache/torch_extensions, and reinstall torch, DeepSpeed and what else is"
        " compiled into one fresh environment",
        needs=("exit:SIGSEGV",),
        confidence=Confidence.POSSIBLE,
        is_fallback=True,
    ),
    Signature(
        "DS1214",
        "preempted",
        "the scheduler took the nodes away (preemption)",
        "resume from the newest checkpoint; with the guard SIGTERM costs at most one step."
        " Ask for `#SBATCH --requeue --signal=TERM@120`",
        (
            r"CANCELLED AT \S+ DUE TO PREEMPTION",
            r"(?i:spot|instance|node)\b.*\b(?i:interruption notice|will be terminated"
            r"|reclaimed|preempted)",
            r"\b[Pp]reemption (?:notice|signal)|State=PREEMPTED|[Pp]reempted by",
        ),
    ),
    Signature(
        "DS1215",
        "time-limit",
        "the job had used up its time limit",
        "resume from the newest checkpoint, and ask for more time or save within it",
        (
            r"CANCELLED AT \S+ DUE TO TIME LIMIT",
            r"State=TIMEOUT|JobState=TIMEOUT",
        ),
    ),
    Signature(
        "DS1216",
        "told-to-end",
        "a rank was told to end (SIGTERM) and nothing in these logs says by whom: a"
        " scheduler, a person, or a launcher because of another rank, whose log then tells"
        " more",
        "look at the scheduler's log (`sacct -j JOB`), and give the logs of the other"
        " nodes to `ds-toolkit diagnose`",
        needs=("exit:SIGTERM",),
        confidence=Confidence.POSSIBLE,
        is_fallback=True,
    ),
    Signature(
        "DS1217",
        "command-not-found",
        "a program was not found on the node where it should start (127): the shell of a"
        " remote command has another PATH than yours",
        "name the Python by its absolute path, set PATH in .deepspeed_env, or activate the"
        " environment in ~/.bashrc above its check for interactive shells",
        (
            r"(?P<program>[\w./-]*python[\d.]*|deepspeed|torchrun|conda|\S+): (?:command"
            r" )?not found$",
            r"env: .*o such file or directory",
            r"(?:bash|sh|srun|slurmstepd|execve|zsh)\b.*?(?P<program>[/\w.-]+): No such"
            r" file or directory",
            r"o such file or directory: '(?P<program>[^']*(?:python[\d.]*|numactl|ninja"
            r"|ssh))'",
        ),
        unless=("pdsh-missing", "mixed-builds"),
    ),
    Signature(
        "DS1218",
        "no-such-program",
        "the launcher ended with 127: a program was not found",
        "name the Python by its absolute path, and set PATH in .deepspeed_env",
        needs=("exit:127",),
        confidence=Confidence.LIKELY,
        is_fallback=True,
    ),
    Signature(
        "DS1219",
        "not-executable",
        "a file was found that cannot be run (126): it has no execute permission, or lies"
        " on a disk mounted noexec",
        "`chmod +x` it, or start it with `bash` or `python`",
        (
            r"(?:bash|sh|execve|srun|env)\b.*: Permission denied$",
            r"\[Errno 13\] Permission denied: '[^']*(?:\.sh|python[\d.]*)'",
        ),
    ),
    Signature(
        "DS1220",
        "pdsh-missing",
        "pdsh, which DeepSpeed starts remote nodes with, is not installed here",
        "install it (`apt-get install pdsh`), or take `--launcher openmpi|slurm`, or start"
        " each node by itself with `--no_ssh --node_rank`",
        (
            r"rror: launcher 'pdsh' not installed",
            r"pdsh: (?:command )?not found",
            r"o such file or directory: 'pdsh'",
        ),
    ),
    Signature(
        "DS1221",
        "node-failed",
        "a node was lost: the scheduler no longer heard from it",
        "look at `scontrol show node NODE`, leave it out (`#SBATCH --exclude`), and resume"
        " from the newest checkpoint",
        (
            r"CANCELLED.*DUE TO NODE FAILURE",
            r"[Nn]ode failure on (?P<host>\S+)",
            r"State=NODE_FAIL",
        ),
    ),
    Signature(
        "DS1222",
        "cannot-be-run",
        "the launcher ended with 126: what it should start is no program that may be run",
        "`chmod +x` it, or start it with `bash` or `python`",
        needs=("exit:126",),
        confidence=Confidence.LIKELY,
        is_fallback=True,
    ),
)
