"""Frameworks that DeepSpeed is used with; what needs them runs here, or in a process of its own."""
