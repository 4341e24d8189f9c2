"""Settings: from files, the environment and flags; their types, and units of time and size."""
