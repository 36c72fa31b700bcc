"""What to run: configurations that fit the model, the machine and the person's wishes."""
