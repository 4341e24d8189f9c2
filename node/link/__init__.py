"""Links between neighbours: handshake, keys, records, set-up and rotation."""
