"""The machine below: files, locks, folders, processes, logs, addresses, settings."""
