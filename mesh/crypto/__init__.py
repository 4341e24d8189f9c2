"""Encodings, labels, keys, signed envelopes and link suites."""
