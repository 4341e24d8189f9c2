"""Who may call what, and how callers and this coordinator prove who they are."""
