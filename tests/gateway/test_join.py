"""A gateway's enrolment, from its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from sealring.gateway.join import load_gateway
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import ConfigError
from sealring.mesh.member import IDENTITY_KEY, load_machine_state, save_machine_state
from sealring.mesh.pki import Role


def other_key(cluster: Any) -> None:
    (cluster.state_dir / IDENTITY_KEY).unlink()
    SoftwareSigner.load_or_create(cluster.state_dir / IDENTITY_KEY)


def no_key(cluster: Any) -> None:
    (cluster.state_dir / IDENTITY_KEY).unlink()


def other_role(cluster: Any) -> None:
    peer, state = cluster.peer(cluster.gateway, Role.MEMBER), load_machine_state(cluster.state_dir)
    save_machine_state(cluster.state_dir, dataclasses.replace(state, peer=peer, tls=cluster.material(peer)))


async def test_an_enrolled_gateway_has_its_own_key(make_cluster: Any) -> None:
    cluster = await make_cluster(1)
    state, signer = load_gateway(cluster.state_dir)
    assert (state.peer, signer.public_key) == (
        cluster.peer(cluster.gateway, Role.GATEWAY),
        cluster.gateway.public_key,
    )


@pytest.mark.parametrize("damage", [other_key, no_key, other_role])
async def test_an_enrolment_and_a_key_that_do_not_belong_together_are_refused(
    make_cluster: Any, damage: Callable[[Any], None]
) -> None:
    cluster = await make_cluster(1)
    damage(cluster)
    with pytest.raises(ConfigError) as caught:
        load_gateway(cluster.state_dir)
    assert caught.value.reason == "MEMBER_STATE_CORRUPT"
