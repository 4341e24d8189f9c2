"""Prefixes on disk: blocks of kept caches, sealed, in a bounded folder (docs/decisions/0047)."""
