"""`python -m bench report`: docs/performance.md anew from the measurements beside it."""

from __future__ import annotations

import sys

from bench.report import main

if sys.argv[1:] != ["report"]:
    sys.exit("usage: python -m bench report; `sealring bench` measures")
main()
