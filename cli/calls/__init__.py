"""Calls to a cluster: the Admin service as an operator, the Inference service as a client."""
