"""The flags of DeepSpeed's zero_to_fp32.py with the toolkit's engine: `python -m ds_toolkit.zero_to_fp32`.

It writes the files that DeepSpeed's script would write, over those that are there, and executes nothing that
is in the checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_toolkit.cli.consolidate_report import print_result, progress_of
from ds_toolkit.files import make_directory


def main() -> None:
    """Parse the command line as DeepSpeed 0.19.8 does (deepspeed/utils/zero_to_fp32.py) and write."""
    from ds_toolkit.convert.consolidate import consolidate

    parser = argparse.ArgumentParser(prog="python -m ds_toolkit.zero_to_fp32")
    parser.add_argument("checkpoint_dir", help="the save directory")
    parser.add_argument("output_dir", help="the folder that pytorch_model.bin goes to")
    parser.add_argument("--max_shard_size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; by default what `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen weights out")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; there is nothing more to print")
    said = parser.parse_args()
    make_directory(Path(said.output_dir).parent)
    with progress_of(Path(said.output_dir).name, silent=False) as progress:
        result = consolidate(
            said.checkpoint_dir,
            f"{said.output_dir}/",
            tag=said.tag,
            file_format="safetensors" if said.safe_serialization else "bin",
            max_shard_size=said.max_shard_size,
            exclude_frozen=said.exclude_frozen_parameters,
            force=True,
            progress=progress,
        )
    print_result(result, as_json=False)
