"""A second machine that has a copy of the coordinator's state and can take over."""
