"""What runs inside the training process: saving, resuming, and staying out of the way."""
