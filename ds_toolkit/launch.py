"""`deepspeed --module ds_toolkit.launch train.py ARGS`: a script that cannot be edited, with a guard."""

if __name__ == "__main__":
    import sys

    from ds_toolkit.integrations.launching import main

    main(sys.argv[1:])
