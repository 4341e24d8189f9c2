"""The roster: its model, bytes, rules, reader, and the memory against older ones."""
