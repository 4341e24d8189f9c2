"""Signs rosters from the contents of the store."""
