"""What this machine takes as a node: address, port, identity, and the settings written for it."""
