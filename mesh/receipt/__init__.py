"""Receipts: what the members of a ring sign for an answer, and how a client checks it."""
