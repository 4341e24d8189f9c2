"""Model folders: found by name, or fetched."""
