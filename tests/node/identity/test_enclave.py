"""The Secure Enclave signer against a stand-in that speaks its frames, well and badly."""

from __future__ import annotations

import concurrent.futures
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from sealring.mesh.crypto import Label, Signer, SoftwareSigner, encode_public_key, private_pem, verify
from sealring.mesh.errors import Unavailable
from sealring.node.identity.enclave import MAX_REQUEST_BYTES, EnclaveSigner
from sealring.node.stored.keys import SecretHolder

STANDIN = Path(__file__).parents[2] / "support" / "enclave_standin.py"
KEY = ec.generate_private_key(ec.SECP256R1())

Make = Callable[..., EnclaveSigner]


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """The stand-in as one executable, run by this interpreter."""
    script = tmp_path / "helper"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def make(tmp_path: Path, helper: Path) -> Iterator[Make]:
    made: list[EnclaveSigner] = []

    def start(how: str = "well", *, seconds: float = 200.0) -> EnclaveSigner:
        behave(tmp_path, how)
        made.append(EnclaveSigner(helper, tmp_path / "key", seconds=seconds))
        return made[-1]

    yield start
    for signer in made:
        signer.close()


def behave(folder: Path, how: str, key: ec.EllipticCurvePrivateKey = KEY) -> None:
    (folder / "key").write_bytes(how.encode() + b"\n" + private_pem(key))


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(Unavailable) as caught:
        action()
    assert caught.value.reason == "ENCLAVE_FAILED"
    return caught.value.message


def test_it_signs_under_every_label_as_a_software_key_would(make: Make) -> None:
    signer = make()
    assert isinstance(signer, Signer)
    assert signer.key_type == "secure_enclave"
    assert signer.public_key == SoftwareSigner(KEY).public_key == encode_public_key(KEY.public_key())
    for label in Label:
        verify(signer.public_key, label, b"content", signer.sign(label, b"content"))


def test_a_secret_is_the_enclaves_and_the_seeds(make: Make) -> None:
    signer = make()
    assert isinstance(signer, SecretHolder)
    seed = encode_public_key(ec.generate_private_key(ec.SECP256R1()).public_key())
    assert len(signer.derive(seed)) == 32
    assert signer.derive(seed) == signer.derive(seed) != signer.derive(seed[::-1])


def test_empty_and_largest_content(make: Make) -> None:
    signer = make()
    largest = bytes(MAX_REQUEST_BYTES - 2 - len(Label.JOIN.value))
    for content in (b"", largest):
        verify(signer.public_key, Label.JOIN, content, signer.sign(Label.JOIN, content))
    assert "too large" in refused(lambda: signer.sign(Label.JOIN, largest + b"x"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("end", "ended"),
        ("truncated", "ended"),
        ("oversized", "impossible length"),
        ("empty", "impossible length"),
        ("error", "it says: busy"),
        ("says 1", "it says: "),
        ("says 256", f"it says: {'x' * 255}"),
        ("says 257", "impossible length"),
        ("unreadable", "something unreadable"),
        ("garbage", "not by the identity key"),
        ("other key", "not by the identity key"),
    ],
)
def test_a_helper_that_misbehaves_is_refused_and_another_started(
    make: Make, tmp_path: Path, how: str, message: str
) -> None:
    signer = make(how)
    assert message in refused(lambda: signer.sign(Label.JOIN, b"x"))
    behave(tmp_path, "well")
    signer.close()
    verify(signer.public_key, Label.JOIN, b"x", signer.sign(Label.JOIN, b"x"))


def test_why_a_helper_ended_is_in_the_error_and_the_log(make: Make) -> None:
    with structlog.testing.capture_logs() as logs:
        assert refused(lambda: make("refuses: no key: interaction not allowed")).endswith(
            "refuses: no key: interaction not allowed"
        )
    assert [(one["event"], one["said"]) for one in logs] == [
        ("enclave_helper", "refuses: no key: interaction not allowed")
    ]


def test_a_daemon_with_more_descriptors_than_select_takes(make: Make) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:
            held.append(os.open(os.devnull, os.O_RDONLY))
        signer = make()
        verify(signer.public_key, Label.JOIN, b"x", signer.sign(Label.JOIN, b"x"))
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("how", ["hang", "half"])
def test_a_helper_that_hangs_is_killed(make: Make, tmp_path: Path, how: str) -> None:
    signer = make(how, seconds=3.0)
    assert "does not answer" in refused(lambda: signer.sign(Label.JOIN, b"x"))
    assert not [one for one in psutil.Process().children() if str(tmp_path) in " ".join(one.cmdline())]
    behave(tmp_path, "well")
    verify(signer.public_key, Label.JOIN, b"x", signer.sign(Label.JOIN, b"x"))


@pytest.mark.parametrize("how", ["always garbage", "always end", "always oversized", "always other key"])
def test_no_signer_without_a_good_public_key(make: Make, how: str) -> None:
    refused(lambda: make(how))


def test_a_helper_that_comes_back_with_another_key_is_refused(make: Make, tmp_path: Path) -> None:
    signer = make("end")
    refused(lambda: signer.sign(Label.JOIN, b"x"))
    behave(tmp_path, "well", ec.generate_private_key(ec.SECP256R1()))
    assert "not by the identity key" in refused(lambda: signer.sign(Label.JOIN, b"x"))


def test_a_helper_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(lambda: EnclaveSigner(tmp_path / "nothing", tmp_path / "key"))


def test_threads_take_turns(make: Make) -> None:
    signer = make()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        contents = [str(number).encode() for number in range(32)]
        signatures = list(pool.map(lambda content: signer.sign(Label.CHALLENGE, content), contents))
    for content, signature in zip(contents, signatures, strict=True):
        verify(signer.public_key, Label.CHALLENGE, content, signature)
