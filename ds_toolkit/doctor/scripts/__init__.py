"""Training scripts, read and never run: what will hang, be lost, or differ from rank to rank."""
