"""Something went wrong, or might: what was seen, what it means, and what mends it."""
