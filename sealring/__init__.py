"""sealring: the public contract (`sealring.v1`) and the client library."""
