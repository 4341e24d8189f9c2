"""Prefixes on disk: blocks of kept caches, sealed under a member's keys, in a bounded folder (docs/decisions/0047)."""
