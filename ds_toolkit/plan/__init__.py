"""Arithmetic before a run: what it needs, and what to turn on when that does not fit."""
