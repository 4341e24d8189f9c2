"""What was used, by key, model and day: numbers alone, in a small database, for a year."""
