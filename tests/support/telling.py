"""As `hasty.py`, with engines that tell (`telling_engine.py`)."""

from __future__ import annotations

import hasty

if __name__ == "__main__":
    hasty.main("telling_engine")
