"""`sealring up --lan`: another device asks by HTTPS, with the key and the certificate that are printed."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from machines import Machine

pytestmark = pytest.mark.integration
QUESTION = "What is the capital of France?"


def ask(url: str, key: str = "", certificate: str = "") -> str:
    """The answer at an OpenAI base URL."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    trusted = ssl.create_default_context(cafile=certificate) if certificate else None
    with urllib.request.urlopen(request, timeout=120, context=trusted) as answer:
        return str(answer.read())


def test_a_phone_asks_with_the_key_and_the_certificate_that_up_prints(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one")
    words = ("up", "--address", "127.0.0.1", "--name", "one", "--model", "demo")
    with machine.running(*words, "--lan") as up:
        url = up.wait_for("  https://").strip()
        key = up.wait_for(lambda line: line.startswith("  srk_")).strip()
        told = re.search(r"trust (.+) \(docs", up.wait_for("They have to trust"))
        assert told is not None
        loopback = up.wait_for("gateway at http://").partition("gateway at ")[2]
        up.wait_for("demo is serving")
        assert "Paris" in ask(url, key, told[1])
        for wrong in ("", "none", f"{key[:-4]}aaaa"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask(url, wrong, told[1])
            assert caught.value.code == 401
            caught.value.close()
        with pytest.raises(urllib.error.URLError, match=r"self-signed|unable to get"):
            ask(url, key)
        assert "Paris" in ask(f"{loopback}/v1"), "loopback is as it was"
        assert "its LAN door is open at https://127.0.0.1:" in machine.run("status")
        assert "house" in machine.run("usage")
        machine.run("key", "revoke", "--lan", "--all")
        with pytest.raises(urllib.error.URLError):
            ask(url, key, told[1])
        assert "Paris" in ask(f"{loopback}/v1")
    with machine.running(*words) as up:
        up.wait_for("demo is serving")
        assert "LAN door" not in machine.run("status"), "nothing is opened without the option"
        with pytest.raises(urllib.error.URLError):
            ask(url, key, told[1])
    with machine.running(*words, "--lan") as up:
        again = up.wait_for(lambda line: line.startswith("  srk_")).strip()
        assert up.wait_for("  https://").strip() == url
        assert again != key
        up.wait_for("demo is serving")
        assert "Paris" in ask(url, again, told[1])
