"""Signs rosters from the contents of the store, and the head of the audit log."""
