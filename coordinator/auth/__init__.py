"""The rights of callers, and the proofs that callers and this coordinator make of their identities."""
