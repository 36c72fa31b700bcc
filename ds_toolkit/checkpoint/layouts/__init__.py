"""The layouts of DeepSpeed's checkpoints: from the files of a tag to the tensors in them."""
