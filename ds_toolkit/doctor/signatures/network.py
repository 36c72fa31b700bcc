"""DS1240 to DS1259: NCCL, gloo, and how ranks find each other."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Confidence, Signature
from ds_toolkit.findings import Severity

NETWORK = (
    Signature(
        "DS1240",
        "nccl-wrong-interface",
        "NCCL or gloo took an interface that leads to no other node, or the one that was named is not there",
        "name the right one: `NCCL_SOCKET_IFNAME=eth0` and `GLOO_SOCKET_IFNAME=eth0` in"
        " .deepspeed_env; `ds-toolkit gen-env` finds it",
        (
            r"NCCL WARN .*(?:o socket interface found|No interface found|could not find any"
            r" interface)",
            r"Bootstrap : (?:Using|no socket interface found)(?: \[0\])? ?(?:lo|docker\d*"
            r"|virbr\d*|br-\w+|veth\w+)(?=:)",
            r"Bootstrap : no socket interface found",
            r"rror.*(?:Unable to find (?:address|interface) for|[Uu]nable to find interface)",
            r"NCCL WARN Bootstrap : .*no usable",
        ),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1241",
        "nccl-no-route",
        "a rank could not reach {peer}: {why}",
        "open the ports between the nodes (NCCL takes any: `NCCL_IB_DISABLE`, firewalls,"
        " security groups), and name the interface that they share with"
        " NCCL_SOCKET_IFNAME; `ping` and `nc` from the one to the other",
        (
            r"NCCL WARN (?:\w+: )?(?:Call to c|[Cc])onnect\w* (?:to (?P<peer>\S+)"
            r" )?(?:failed|returned)[^A-Z]*(?P<why>No route to host|Connection timed out"
            r"|Connection refused|Network is unreachable|Software caused connection abort)",
            r"NCCL WARN .*onnect\w*:? .*?(?P<peer>\d+\.\d+\.\d+\.\d+<\d+>).*(?P<why>No"
            r" route to host|Connection timed out|Connection refused|Network is unreachable"
            r"|Software caused connection abort)",
            r"NCCL WARN .*(?P<why>timeout waiting for connect|Bootstrap Root.*timed out)",
        ),
    ),
    Signature(
        "DS1242",
        "infiniband-down",
        "InfiniBand is absent or half up: {what}",
        "look at `ibstat` on each node (State: Active, Physical state: LinkUp) and at"
        " `ulimit -l` (unlimited); name the ports that work with NCCL_IB_HCA, or go"
        " without with NCCL_IB_DISABLE=1 (slow); RoCE needs NCCL_IB_GID_INDEX",
        (
            r"NCCL WARN .*(?P<what>Got async event : port (?:error|down)|.*local"
            r" catastrophic error)",
            r"NCCL WARN (?P<what>.*Got completion .*(?:status|error|with) ?=?\d+.*)",
            r"NCCL WARN (?P<what>Call to ibv_\w+ failed.*|ibv_\w+ failed.*|NET/IB : Unable"
            r" to open device.*)",
            r"(?P<what>rror: libibverbs.*|No device found.*NCCL_IB_HCA.*NCCL WARN)",
            r"NCCL WARN (?P<what>NET/IB : No device found.*)",
        ),
    ),
    Signature(
        "DS1243",
        "gpu-peer-access-broken",
        "GPUs of one node cannot reach each other's memory: {what}",
        "try NCCL_P2P_DISABLE=1; if that helps, look at `nvidia-smi topo -m`, at ACS in"
        " the BIOS, at IOMMU, and give containers `--ipc=host`",
        (
            r"(?:NCCL WARN|rror).*(?P<what>(?:Cuda failure )?'?peer (?:access"
            r"|mapping)[^']*(?:not supported|exhausted|denied)[^']*)",
            r"(?:NCCL WARN|rror).*(?P<what>[Ff]ailed to open CUDA IPC handle.*|cudaIpc\w+.*"
            r"|Could not (?:enable|map) (?:P2P|peer).*)",
            r"NCCL WARN (?P<what>P2P/?\w* .*(?:not possible|ailed).*)",
        ),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1244",
        "gpu-fault",
        "a GPU or its driver failed: {what}",
        "take the node out, look at `nvidia-smi -q` (ECC, retired pages) and `dmesg | grep"
        " Xid`, reset the GPU or reboot; NVIDIA's list of Xid errors names the part",
        (
            r"NVRM: Xid \([^)]*\): (?P<what>\d+.*)",
            r"rror.*(?P<what>uncorrectable (?:NVLink|ECC) error.*|unspecified launch"
            r" failure)",
            r"(?P<what>GPU has fallen off the bus|Unable to determine the device handle for"
            r" GPU.*nable to.*|nable to determine the device handle for (?:GPU|gpu).*)",
        ),
    ),
    Signature(
        "DS1245",
        "nccl-version-mismatch",
        "ranks run different builds of NCCL: {what}",
        "the same torch on every node (`python -c 'import torch;"
        " print(torch.cuda.nccl.version())'`), and no other libnccl in LD_LIBRARY_PATH or"
        " LD_PRELOAD",
        (
            r"NCCL WARN (?P<what>.*[Mm]ismatched NCCL version.*|.*NCCL version mismatch.*)",
            r"NCCL WARN (?P<what>.*Message truncated : received \d+ bytes instead of \d+.*)",
            r"NCCL WARN (?P<what>.*(?:wrong type \d+ != \d+|[Ii]nvalid magic|wrong magic).*)",
            r"rror.*(?P<what>NCCL version mismatch.*|[Mm]ismatched NCCL.*)",
        ),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1246",
        "nccl-timeout",
        "ranks waited in {operation} (number {sequence}) until the watchdog's time-out; a"
        " rank that did not come is elsewhere: dead, in another collective, or still busy",
        "find the rank that is missing: ds_toolkit's guard names it (`hang_after`),"
        " TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 writes what"
        " `diagnose --run-dir` reads. If a rank is slow for a reason (saving, tokenizing),"
        " raise `timeout=` of init_distributed",
        (
            r"Watchdog caught collective operation timeout:"
            r" WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+)",
            r"Timeout at NCCL work: (?P<sequence>\d+)(?=.*imeout)|Timeout at NCCL work:"
            r" (?P<number>\d+).*erminat",
            r"NCCL watchdog thread terminated with exception.*imeout",
        ),
    ),
    Signature(
        "DS1247",
        "collectives-differ",
        "ranks called different collectives: {what}",
        "all ranks must call the same ones in the same order; look for a collective, a"
        " save or a log call under a condition that depends on the rank (`ds-toolkit"
        " check-script train.py`)",
        (
            r"(?P<what>Detected mismatch between collectives on ranks.*)(?<=.)"
            r"|rror.*Detected mismatch between collectives",
            r"rror.*(?P<what>[Cc]ollectives? (?:.*)differ.*|mismatched? collectives?.*)",
            r"NCCL WARN (?P<what>.*[Mm]ismatched (?:collective|size).*)",
        ),
    ),
    Signature(
        "DS1248",
        "gloo-cannot-connect",
        "gloo could not connect the ranks: {what}",
        "set GLOO_SOCKET_IFNAME to the interface that the nodes share (in .deepspeed_env),"
        " and see that each node resolves its own name to the address on it (`hostname"
        " -I`, /etc/hosts)",
        (
            r"(?P<what>Gloo connectFullMesh failed with.*)",
            r"gloo/transport/tcp/\w+\.(?:cc|h):\d+\] (?P<what>.*(?:connect.*(?:refused"
            r"|timed out|No route)|SO_ERROR: .*|onnect timeout|resolve.*).*)",
            r"rror.*(?P<what>[Gg]loo.*(?:unable to resolve|nable to find).*)",
            r"\[c10d\].*(?P<what>[Tt]he (?:hostname|IPv[46] network addresses).*(?:cannot"
            r" be retrieved|could not be).*)",
        ),
        confidence=Confidence.LIKELY,
    ),
    Signature(
        "DS1249",
        "ranks-did-not-meet",
        "not all ranks came to the meeting point{where}: {what}",
        "start as many ranks as WORLD_SIZE says; see on the missing node why it did not"
        " start, whether it reaches MASTER_ADDR:MASTER_PORT (`nc -zv`), and whether both"
        " are the same on all nodes",
        (
            r"rror: (?P<what>Timed out after \d+ seconds waiting for clients\. \d+/\d+"
            r" clients joined)",
            r"(?P<what>[Tt]he client socket has (?:timed out|failed to"
            r" connect)[^(]*)(?P<where>\([^)]*\))?",
            r"(?P<what>RendezvousTimeoutError|RendezvousConnectionError: .*)",
            r"(?P<what>wait timeout after \d+ms, keys: \S*)",
        ),
        unless=("port-in-use", "gloo-cannot-connect"),
    ),
    Signature(
        "DS1250",
        "port-in-use",
        "the port of the meeting point is taken: another job, or what is left of an earlier one",
        "choose another (`--master_port`, `--rdzv-endpoint`; `torchrun --standalone` takes"
        " a free one), or end the process that has it (`ss -ltnp`)",
        (
            r"EADDRINUSE.*(?:lready in use|rror)|rror.*EADDRINUSE",
            r"(?:rror|ailed).*[Aa]ddress already in use",
            r"[Aa]ddress already in use.*(?:rror|ailed)|\[Errno 98\].*lready in use",
        ),
    ),
    Signature(
        "DS1251",
        "peers-lost",
        "ranks lost the connection to another rank, which ended without an exception of its own: by"
        " a signal, most often; the exit code that DeepSpeed's launcher tells may be a survivor's",
        "look into the kernel's log of its node (`dmesg -T`), and give the logs of all nodes and ranks to"
        " `ds-toolkit diagnose`",
        needs=("marker:peer-lost",),
        confidence=Confidence.POSSIBLE,
        severity=Severity.WARNING,
        is_fallback=True,
    ),
    Signature(
        "DS1252",
        "no-such-gpu",
        "a rank asked for a GPU that is not there",
        "start no more ranks than GPUs (`slots=` of the hostfile, `--nproc-per-node`), and"
        " look at CUDA_VISIBLE_DEVICES: under `deepspeed` choose GPUs with `--include`",
        (
            r"rror: .*invalid device ordinal",
            r"rror: .*[Nn]o CUDA GPUs are available",
            r"rror: .*Duplicate GPU detected|NCCL WARN Duplicate GPU detected",
        ),
    ),
)
