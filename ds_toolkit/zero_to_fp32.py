"""`python -m ds_toolkit.zero_to_fp32 CKPT OUT`: DeepSpeed's script of that name, done by the toolkit."""

if __name__ == "__main__":
    from ds_toolkit.cli.app import end_with
    from ds_toolkit.cli.zero_to_fp32 import main

    end_with(main)
