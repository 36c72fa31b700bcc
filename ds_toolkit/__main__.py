"""`python -m ds_toolkit` is the command `ds-toolkit`."""

from ds_toolkit.cli import main

if __name__ == "__main__":
    main()
