"""The identity of this node, and its attestation."""
