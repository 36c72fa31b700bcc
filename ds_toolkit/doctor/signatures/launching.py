"""DS1260 to DS1269: ssh, hostfiles, environment files, and launches that did not happen."""

from __future__ import annotations

from ds_toolkit.doctor.signatures.signature import Signature

LAUNCHING = (
    Signature(
        "DS1260",
        "ssh-refused",
        "a node cannot be reached by ssh without a password: {what}",
        "`ssh-copy-id` to each host, once `ssh HOST hostname` from this one to accept its"
        " key, and check names and port in ~/.ssh/config; `ds-toolkit preflight --hostfile"
        " F` tries all of them",
        (
            r"(?P<what>[\w@.-]*:? ?Permission denied \((?:publickey|password"
            r"|keyboard)[^)]*\))",
            r"(?P<what>Host key verification failed)",
            r"(?P<what>ssh: connect to host \S+ port \d+: .*)",
            r"(?P<what>ssh: Could not resolve hostname [^:\s]+)",
            r"rror: Using hostfile at .* but (?P<what>host=\S+ was not reachable via ssh)",
        ),
    ),
    Signature(
        "DS1261",
        "hostfile-refused",
        "the hostfile cannot be used: {what}",
        "one `host slots=N` a line, no spaces around `=`, no host twice; `ds-toolkit lint"
        " hostfile` names the line",
        (
            r"rror: (?P<what>Hostfile contains a bad entry: [^,]*)",
            r"rror: (?P<what>Hostfile contains multiple entries for \S+)",
            r"rror: (?P<what>Hostfile is (?:empty or )?not formatted correctly)",
            r"rror: (?P<what>Hostname '[^']*' not found in hostfile|No slot '[^']*'"
            r" specified on host '[^']*')",
        ),
    ),
    Signature(
        "DS1262",
        "launched-on-one-node",
        "the hostfile was not found, and DeepSpeed went on with this node alone",
        "name it with `--hostfile` by a path that exists; the default is /job/hostfile."
        " `--force_multi` and the line `nnodes=` of the launcher show what it took",
        (r"Unable to find hostfile, will proceed with training with local resources only",),
        needs=("marker:several-nodes|several-nodes-wanted",),
    ),
    Signature(
        "DS1263",
        "no-nodes-beyond-this",
        "several nodes were asked for, and no hostfile names any",
        "write a hostfile, and name it with `--hostfile`",
        (r"rror: Num nodes is >1 but no extra nodes available via hostfile",),
    ),
    Signature(
        "DS1264",
        "env-file-ends-launch",
        "the environment file has a blank line or a comment, by which DeepSpeed's launcher dies",
        "leave only lines KEY=VALUE in .deepspeed_env (the home folder and the working"
        " folder); `ds-toolkit lint .deepspeed_env` names the line",
        (r"ValueError: not enough values to unpack \(expected 2, got 1\)",),
        needs=("marker:env-file-read|frame:runner.py",),
    ),
    Signature(
        "DS1265",
        "launch-commented-away",
        "nothing ran, with exit code 0: `{what}` of the environment file made a comment of"
        " the rest of the remote command",
        "remove the comment from .deepspeed_env; `ds-toolkit lint .deepspeed_env` names"
        " the line. Variables of the remote shell have been printed to this log: change"
        " the secrets among them",
        (r"cmd = (?:pdsh|ssh)\b.*?(?P<what>export \s*#[^;=]*)",),
    ),
    Signature(
        "DS1266",
        "nothing-launched",
        "the launcher found no process to start: dist_world_size is 0",
        "give each host of the hostfile `slots=` of at least 1, and look at `--include` and `--exclude`",
        (r"dist_world_size=0(?!\d)",),
    ),
    Signature(
        "DS1267",
        "script-not-found",
        "the training script is not there on the node where it should start: {what}",
        "name it by an absolute path on storage that all nodes share",
        (
            r"an't open file '(?P<what>[^']*)': \[Errno 2\] No such file or directory",
            r"rror: (?P<what>No module named '?[\w.]+'?).*__main__|/python\S*:"
            r" (?P<module>No module named \S+)(?=.*|rror)$",
            r"FileNotFoundError: .*o such file or directory: '(?P<what>[^']*\.py)'",
        ),
    ),
    Signature(
        "DS1268",
        "config-refused",
        "DeepSpeed refused the configuration: {what}",
        "`ds-toolkit lint ds_config.json` names the line and the fix",
        (
            r"(?P<what>\d+ validation errors? for DeepSpeed\w*)",
            r"(?P<what>DeepSpeedConfigError: .*)",
            r"(?P<what>(?:hjson\.\S*)?HjsonDecodeError: .*)",
            r"rror: (?P<what>Expected a string path to an existing deepspeed config.*)",
            r"rror: (?P<what>Duplicate keys in DeepSpeed config.*)",
        ),
    ),
    Signature(
        "DS1269",
        "wrong-arguments",
        "the script refused its arguments: {what}",
        "a script under `deepspeed` is given --local_rank=N: accept it, or launch with `--no_local_rank`",
        (r"rror: (?P<what>unrecognized arguments: .*--local[_-]rank.*)",),
    ),
)
