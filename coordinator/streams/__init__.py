"""The streams of nodes and gateways."""
