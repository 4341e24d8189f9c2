"""The commands with the real huggingface_hub, and a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from localhub import LocalHub, local_hub
from small_models import write_model

Sealring = Callable[..., Any]
CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 64},
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    write_model(tmp_path / "published", CONFIG)
    files = {file.name: file.read_bytes() for file in (tmp_path / "published").iterdir()}
    with local_hub("org/Tiny-1B", {**files, "modeling.py": b"raise SystemExit"}) as running:
        yield running


def test_models_are_found_by_words(hub: LocalHub, sealring: Sealring) -> None:
    done = sealring("model", "search", "tiny", "--json", HF_ENDPOINT=hub.url)
    assert done.data == [{"id": "org/Tiny-1B", "downloads": 7, "likes": 2}]
    assert "(none)" in sealring("model", "search", "no", "such", "--all", HF_ENDPOINT=hub.url).err
    first, second = hub.searched
    assert (first["search"], first["filter"], first["sort"]) == ("tiny", "mlx", "downloads")
    assert "filter" not in second
    assert second["search"] == "no such"


def test_no_more_of_a_list_of_models_is_read_than_a_screen_can_need(
    hub: LocalHub, sealring: Sealring
) -> None:
    hub.pads_list = 9 << 20
    done = sealring("model", "search", "tiny", HF_ENDPOINT=hub.url)
    assert done.status != 0
    assert "[BAD_HUB_ANSWER]" in done.err
    assert "Traceback" not in done.err


def test_a_model_is_fetched_and_written_in_fewer_bits(hub: LocalHub, sealring: Sealring, home: Path) -> None:
    done = sealring("model", "get", "org/Tiny-1B", "--bits", "4", HF_ENDPOINT=hub.url)
    assert done.status == 0, done.err
    made = home / "models" / "Tiny-1B-4bit"
    assert f"sealring deploy {made}" in done.err
    assert json.loads((made / "config.json").read_text("utf-8"))["quantization"]["bits"] == 4
    assert not list((home / "models").rglob("*.py"))
    assert not list((home / "models" / ".fetched").rglob("*.safetensors"))
    again = sealring("model", "get", "org/Tiny-1B", "--bits", "8", "--keep", HF_ENDPOINT=hub.url)
    assert again.status == 0, again.err
    assert list((home / "models" / ".fetched").rglob("*.safetensors"))


def test_on_a_terminal_shares_never_fall_and_a_hub_that_stalls_stops_no_clock(
    tmp_path: Path, home: Path
) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1536}
    write_model(tmp_path / "wide", CONFIG | wide)
    terminal, its = os.openpty()
    with local_hub(
        "org/Wide", {file.name: file.read_bytes() for file in (tmp_path / "wide").iterdir()}
    ) as hub:
        hub.breaks_after, hub.stalls = 12 << 20, threading.Event()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "sealring.cli", "model", "get", "org/Wide"],
            env={**os.environ, "HOME": str(home), "HF_ENDPOINT": hub.url, "TERM": "xterm", "COLUMNS": "120"},
            stdin=its,
            stdout=its,
            stderr=its,
        )
        os.close(its)
        shown, while_stalled = "", set[str]()
        with suppress(OSError):  # its other end is closed
            while part := os.read(terminal, 1 << 16):
                shown += part.decode(errors="replace")
                if hub.stalled.is_set():
                    while_stalled |= set(re.findall(r"0:00:[0-9]{2}", part.decode(errors="replace")))
                if len(while_stalled) > 2:
                    hub.stalls.set()
    os.close(terminal)
    assert child.wait(200) == 0, shown
    shares = [int(share) for share in re.findall(r"org/Wide: ([0-9]+) %", shown)]
    assert shares == sorted(shares)
    assert {0, 50, 100} <= set(shares)


@pytest.mark.parametrize(
    ("model", "bits", "reason"),
    [("org", "4", "BAD_MODEL_ID"), ("org/x", "7", "BAD_BITS"), ("org/x", "4", "MODEL_NOT_FOUND")],
)
def test_what_is_no_model_is_refused(
    model: str, bits: str, reason: str, hub: LocalHub, sealring: Sealring
) -> None:
    done = sealring("model", "get", model, "--bits", bits, HF_ENDPOINT=hub.url)
    assert done.status != 0
    assert f"[{reason}]" in done.err


def test_a_name_of_the_list_is_fetched_by_its_id(sealring: Sealring) -> None:
    done = sealring("model", "get", "qwen3-0.6b", HF_ENDPOINT="http://127.0.0.1:9")
    assert "fetching Qwen/Qwen3-0.6B" in done.err


def test_a_network_that_is_missing_is_said_in_words(sealring: Sealring) -> None:
    done = sealring("model", "get", "org/x", HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in done.err
    assert "Traceback" not in done.err
