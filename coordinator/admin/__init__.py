"""What operators do, a module for each noun; each change with an entry in the audit log."""
