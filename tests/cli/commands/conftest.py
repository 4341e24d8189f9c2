from __future__ import annotations

from rosterkit import make_authority
from rosterkit import make_cluster as make_signed_cluster

__all__ = ["make_authority", "make_signed_cluster"]
