"""Prefixes on disk: blocks of kept caches, sealed under keys of this member, in a bounded folder (decision 47)."""
