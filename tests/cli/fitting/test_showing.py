"""The table of `sealring model fits`: what it counts is what it leaves out."""

from __future__ import annotations

import contextlib
import io
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from sealring.cli.fitting.fitting import Fit
from sealring.cli.fitting.machines import mac
from sealring.cli.fitting.showing import Row, print_fits

MACS = [mac(16), mac(64)]


def printed(found: list[Row], *, every: bool, as_json: bool = False) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_fits(found, MACS, "as given", listed=True, every=every, as_json=as_json)
    return shown.getvalue()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.booleans())
def test_each_model_is_shown_or_counted_once(fitting: list[bool], every: bool) -> None:
    """In the order of the list. Where none fits, all are shown, with what they lack."""
    fits, lacks = Fit(1 << 30, ("16 GB",), 4096, 9.0), Fit(1 << 40, lacking=1 << 39)
    found = [(f"model-{place}", 10**9, "4 bits", fits if one else lacks) for place, one in enumerate(fitting)]
    text = printed(found, every=every)
    shown = [int(place) for place in re.findall(r"^model-(\d+) ", text, re.MULTILINE)]
    wanted = [place for place, one in enumerate(fitting) if one or every or not any(fitting)]
    assert shown == wanted
    counted = re.search(r"^(\d+) more do not fit", text, re.MULTILINE)
    assert (int(counted[1]) if counted else 0) == len(found) - len(shown)
    rows = json.loads(printed(found, every=every, as_json=True))["models"]
    assert [bool(row["machines"]) for row in rows] == fitting
