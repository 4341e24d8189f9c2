"""Prefixes on disk: blocks of kept caches, sealed by a member's keys, in a bounded folder (decision 47)."""
