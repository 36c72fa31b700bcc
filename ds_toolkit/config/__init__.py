"""What a ds_config may say, and whether one means what it says."""
