"""Checkpoints on disk: which tags there are, whether they are whole, and where each tensor's bytes lie."""
