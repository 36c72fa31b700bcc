"""What the launcher reads beside the configuration, and what a host has."""
