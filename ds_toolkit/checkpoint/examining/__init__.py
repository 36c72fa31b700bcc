"""Tags and save directories under examination: all that is wrong with them, and what they are."""
