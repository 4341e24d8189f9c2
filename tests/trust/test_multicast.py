"""Attacks on the discovery of clusters, in network namespaces with real multicast.

Two clusters of one name are there, a newcomer, and an attacker on the same network. Whatever the attacker
sends, the newcomer is offered no cluster but these two, by their own roots and addresses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from machines import Machine
from namespaces import separate_machines

pytestmark = pytest.mark.sweep
ATTACKER = Path(__file__).parent / "multicast_attacker.py"
NEWCOMER = Path(__file__).parents[1] / "support" / "newcomer.py"
OWN = "10.77.0.4"
ADDRESS, OTHER = "10.77.0.1:7701", "10.77.0.2:7701"


class Network(NamedTuple):
    first: Machine
    second: Machine
    newcomer: Machine
    attacker: Machine
    root: str

    def look(self) -> list[Any]:
        """Names, roots and addresses of what the newcomer is offered."""
        return self._ask("look")

    def attempt(self, root: str, address: str, *codes: str) -> list[str]:
        """What becomes of codes that the newcomer tries at once."""
        return self._ask("try", root, address, *codes)

    def code(self, machine: Machine) -> str:
        """A new join code of the cluster on this machine."""
        (code,) = re.findall(r"\b[0-9]{3}-[0-9]{4}\b", machine.run("token", "code"))
        return str(code)

    @contextmanager
    def attack(self, name: str) -> Iterator[None]:
        command = [*self.attacker.within, sys.executable, str(ATTACKER), name, OWN, self.root, ADDRESS]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as going:
            assert going.stdout is not None
            assert going.stdout.readline() == "begun\n"
            yield
            going.communicate()

    def _ask(self, *words: str) -> list[Any]:
        command = [*self.newcomer.within, sys.executable, str(NEWCOMER), *words]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found = json.loads(done.stdout)
        assert isinstance(found, list)
        return found


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("multicast")
    names = ["first", "second", "newcomer", "attacker"]
    with separate_machines(folder, names) as machines, ExitStack() as stack:
        for number, machine in enumerate(machines[:2], 1):
            listen = ("--listen", f"10.77.0.{number}:7700")
            machine.run("coordinator", "init", "--cluster", "home", *listen)
            joining = ("--join-listen", f"10.77.0.{number}:7701", "--software-identity-allowed")
            running = stack.enter_context(machine.running("coordinator", "run", *listen, *joining))
            running.wait_for("coordinator_started")
        made = Network(*machines, root="")
        made.code(machines[0])
        ((_, root, _),) = made.look()
        yield made._replace(root=root)


def genuine(network: Network) -> list[Any]:
    """What a newcomer is offered without an attacker, while only the first cluster lets machines join."""
    return ["home", network.root, [ADDRESS]]


@pytest.mark.parametrize("attack", ["lies", "packets"])
def test_lies_and_hostile_packets_neither_offer_nor_hide_a_cluster(network: Network, attack: str) -> None:
    code = network.code(network.first)
    with network.attack(attack):
        assert genuine(network) in network.look()
        assert all(root == network.root for _, root, _ in network.look())
        assert network.attempt(network.root, ADDRESS, code) == ["token"]


def test_a_flood_of_announcements_offers_nothing_false_and_machines_join_by_the_address(
    network: Network,
) -> None:
    code = network.code(network.first)
    with network.attack("flood"):
        assert network.look() in ([], [genuine(network)])
        with network.newcomer.running("join", "10.77.0.1", "--name", "newcomer", typed=f"{code}\n") as join:
            join.wait_for("joined cluster home as newcomer")
            join.wait_for("the node runs until Ctrl-C")


def test_a_crowd_at_the_join_port_keeps_nobody_out(network: Network) -> None:
    with network.attack("connections"):
        for _ in range(3):
            assert network.attempt(network.root, ADDRESS, network.code(network.first)) == ["token"]


def test_what_was_announced_and_is_sent_again_lets_nobody_join(network: Network) -> None:
    network.code(network.first)
    with network.attack("replay"):
        network.first.run("token", "revoke", "code")
        assert network.look() in ([], [genuine(network)]), "its coordinator still shows this root there"
        assert network.attempt(network.root, ADDRESS, "000-0000") == ["NO_CODE"]


def test_of_two_clusters_of_one_name_each_takes_its_own_code_alone(network: Network) -> None:
    codes = [network.code(machine) for machine in (network.first, network.second)]
    found = {address: root for name, root, (address,) in network.look() if name == "home"}
    assert found.keys() == {ADDRESS, OTHER}
    assert found[ADDRESS] != found[OTHER]
    assert network.attempt(found[OTHER], OTHER, codes[0]) == ["WRONG_CODE"]
    assert network.attempt(found[ADDRESS], ADDRESS, codes[0]) == ["token"]
    network.second.run("token", "revoke", "code")


def test_of_guesses_at_once_one_is_compared(network: Network) -> None:
    code = network.code(network.first)
    guesses = [f"{number:07}" for number in range(8) if f"{number:07}" != code.replace("-", "")]
    found = network.attempt(network.root, ADDRESS, *guesses)
    assert found.count("WRONG_CODE") == 1
    assert "token" not in found
    assert network.attempt(network.root, ADDRESS, code) == ["CODE_WAIT"], "for a minute"
