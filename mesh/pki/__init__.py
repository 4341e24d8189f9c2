"""The cluster's certificates and its root metadata."""
