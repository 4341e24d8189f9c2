"""A gateway's identity, from its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sealring.gateway import credentials
from sealring.gateway.credentials import load_gateway
from sealring.mesh.crypto.identity import SoftwareSigner, member_id
from sealring.mesh.errors import ConfigError
from sealring.mesh.member.state import IDENTITY_KEY
from sealring.mesh.pki.certificates import Role


@pytest.mark.parametrize(
    ("role", "own", "key", "good"),
    [
        (Role.GATEWAY, True, True, True),
        (Role.MEMBER, True, True, False),
        (Role.GATEWAY, False, True, False),
        (Role.GATEWAY, True, False, False),
    ],
)
def test_the_enrolment_and_the_key_belong_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, own: bool, key: bool, good: bool
) -> None:
    signer = SoftwareSigner.load_or_create(tmp_path / IDENTITY_KEY)
    identifier = member_id((signer if own else SoftwareSigner.generate()).public_key)
    state = SimpleNamespace(peer=SimpleNamespace(role=role, id=identifier))
    monkeypatch.setattr(credentials, "load_machine_state", lambda folder: state)
    if not key:
        (tmp_path / IDENTITY_KEY).unlink()
    if good:
        found = load_gateway(tmp_path)
        assert (found[0], found[1].public_key) == (state, signer.public_key)
        return
    with pytest.raises(ConfigError) as caught:
        load_gateway(tmp_path)
    assert caught.value.reason == "MEMBER_STATE_CORRUPT"
