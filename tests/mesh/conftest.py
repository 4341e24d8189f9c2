"""Fixtures: a clock that tests turn, root and roster keys, a small cluster and its roster."""

from rosterkit import authority, clock, cluster, make_authority, make_cluster

__all__ = ["authority", "clock", "cluster", "make_authority", "make_cluster"]
