"""The inference service: its interface, one answer's way to the client, and where its time goes."""
