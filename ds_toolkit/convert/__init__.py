"""From one checkpoint to another: bytes are moved, rarely looked at, and never held all at once."""
