"""The rings of the roster and the epochs of each."""
