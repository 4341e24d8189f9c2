"""A cluster of three machines by three kinds of command, here on one machine with three homes."""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from capture import files_of
from machines import Machine, Running
from namespaces import ip, separate_machines

from sealring.cli.here.settings_files import proxy_port
from sealring.mesh.system.addresses import listens

pytestmark = pytest.mark.integration
STANDIN = Path(__file__).parents[1] / "support" / "launchd_standin.py"
QUESTION = "What is the capital of France?"


class Three(NamedTuple):
    first: Machine
    up: Running
    others: list[Running]
    token: str


def start(machine: Machine, stack: ExitStack) -> tuple[Running, str]:
    """`up`, and a token for three machines."""
    up = stack.enter_context(machine.running("up", "--address", "127.0.0.1", "--name", "one"))
    up.wait_for("sealring join")
    return up, machine.run("token", "create", "--uses", "3").split()[-1]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    folder = tmp_path_factory.mktemp("machines")
    with ExitStack() as stack:
        first = Machine(folder / "one")
        up, token = start(first, stack)
        second, third = Machine(folder / "two"), Machine(folder / "three")
        by_argument = stack.enter_context(second.running("join", token, "--name", "two"))
        by_input = stack.enter_context(third.running("join", "-", "--name", "three", stdin=f"{token}\n"))
        for name in ("two", "three"):
            up.wait_for(f"{name} is online")
        first.run("deploy", "demo", "--stages", "3")
        yield Three(first, up, [by_argument, by_input], token)


def ask_at(port: int, key: str) -> str:
    """The answer to a program with the key."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read())


def ask(machine: Machine) -> str:
    ports = json.loads((machine.state / "ports.json").read_text())
    return machine.run("chat", "--gateway", f"127.0.0.1:{ports['gateway']}", QUESTION)


def test_the_three_answer(three: Three) -> None:
    assert "Paris" in ask(three.first)
    for running in (three.up, *three.others):
        running.wait_for("identity: software: the key is in a file")
    three.up.wait_for("demo serves on one, three, two")
    for running in three.others:
        running.wait_for("serves demo: layers ")
        assert any("the coordinator at" in line and line.endswith(" answers") for line in running.lines)
        assert len([line for line in running.lines if line.startswith("identity: ")]) == 1, "told once"


def test_no_process_that_stays_has_the_token_in_its_arguments(three: Three) -> None:
    """Nor does a log or a settings file."""
    secret = three.token.split(".")[3]
    everyone = [one for running in (three.up, *three.others) for one in running.family()]
    assert len(everyone) > 9
    for process in everyone:
        with suppress(psutil.NoSuchProcess):
            assert secret not in " ".join(process.cmdline())
    for file, data in files_of(three.first.folder.parent):
        assert secret.encode() not in data, file


def test_more_tokens_come_from_the_same_line(three: Three) -> None:
    line = three.first.run("token", "create")
    assert line.startswith("sealring join sr2.")
    assert line.split(".")[1] == three.token.split(".")[1]


def test_a_machine_joins_as_a_service(three: Three, tmp_path: Path) -> None:
    """With the account's own process for joining, and launchd's stand-in that really starts the node."""
    machine, prefix = Machine(tmp_path / "four"), tmp_path / "prefix"
    for folder in (prefix, tmp_path / "bin", tmp_path / "loaded"):
        folder.mkdir(mode=0o755)
    launchctl = tmp_path / "bin" / "launchctl"
    places = f'PREFIX="{prefix}" FOLDER="{tmp_path / "loaded"}"'
    launchctl.write_text(f'#!/bin/sh\n{places} exec "{sys.executable}" "{STANDIN}" "$@"\n')
    launchctl.chmod(0o755)
    machine.environment["PATH"] = f"{launchctl.parent}:{os.environ['PATH']}"
    token = three.first.run("token", "create").split()[-1]
    options = ("--service", "--user", getpass.getuser(), "--prefix", str(prefix))
    try:
        machine.run("join", token, *options, "--name", "four", "--address", "127.0.0.1")
        three.up.wait_for("four is online")
        shown = json.loads(machine.run("service", "status", "node", "--json"))
        assert shown[0]["state"] == "running"
        assert token not in " ".join(psutil.Process(shown[0]["pid"]).cmdline())
        machine.run("join", *options)  # again, as after an update, and without a token
        assert json.loads(machine.run("service", "status", "node", "--json"))[0]["pid"] != shown[0]["pid"]
        machine.run("service", "restart", "proxy", "--prefix", str(prefix))  # as at the next boot
        key, port = machine.state / "proxy.key", proxy_port(machine.state)
        assert key.stat().st_mode & 0o777 == 0o600
        while not listens("127.0.0.1", port):
            time.sleep(0.1)
        assert f"http://127.0.0.1:{port}" in machine.run("connect", "opencode")
        assert "Paris" in ask_at(port, key.read_text().strip())
    finally:
        machine.run("service", "uninstall", "node", "--prefix", str(prefix))
    assert not key.exists()
    assert not list((prefix / "Library" / "LaunchDaemons").iterdir())
    assert not listens("127.0.0.1", port)
    three.up.wait_for("four is offline")


@pytest.mark.sweep
def test_three_separate_machines_by_three_kinds_of_command(tmp_path: Path) -> None:
    """With networks of their own, and nothing typed but `up`, `join`, a code, no standby and `deploy`, until
    there is an answer on each. Started again they are the same cluster, and need no code.
    """
    names = ["studio", "mini", "book"]
    with separate_machines(tmp_path, names) as (studio, mini, book), ExitStack() as stack:
        up = stack.enter_context(studio.running("up"))
        code = up.wait_for(lambda line: re.fullmatch(r"  [0-9]{3}-[0-9]{4}", line) is not None)
        others = [stack.enter_context(one.running("join", typed=f"{code}\n\n")) for one in (mini, book)]
        for name in ("mini", "book"):
            up.wait_for(f"{name} is online")
        assert any("10.77.0.1" in said for said in up.lines)
        studio.run("deploy", "demo", "--stages", "3")
        for one in (studio, mini, book):
            assert "Paris" in one.run("chat", QUESTION)
            assert "demo-0" in one.run("status")
        for running in others:
            running.wait_for("programs ask at http://127.0.0.1:8080/v1")
        assert "http://127.0.0.1:8080/v1" in book.run("connect", "opencode")
        up.wait_for("demo serves on book, mini, studio")
        for running in others:
            running.wait_for("serves demo: layers ")

        up.stop()
        for running in others:
            running.wait_for("does not answer")
            running.stop()
        up = stack.enter_context(studio.running("up"))
        for one in (mini, book):
            stack.enter_context(one.running("join"))
        up.wait_for("demo serves on book, mini, studio")
        assert "Paris" in studio.run("chat", QUESTION)


@pytest.mark.sweep
def test_a_ring_takes_the_faster_cable_and_the_other_one_when_that_is_out(tmp_path: Path) -> None:
    """The machines were joined over a slow network, as Macs are over Wi-Fi before they get a cable."""
    names = ["studio", "mini"]
    with separate_machines(tmp_path, names) as (studio, mini), ExitStack() as stack:
        spaces = [f"sealring-{os.getpid()}-{name}" for name in names]
        for space in spaces:
            shape = f"tc -n {space} qdisc add dev net0 root tbf rate 40mbit burst 256kb latency 200ms"
            subprocess.run(shape.split(), check=True)
        ip("link", "add", "tb0", "type", "veth", "peer", "name", "tb0", "netns", spaces[1], space=spaces[0])
        for number, space in enumerate(spaces, 1):
            ip("address", "add", f"169.254.7.{number}/16", "dev", "tb0", space=space)
            ip("link", "set", "tb0", "up", space=space)
        up = stack.enter_context(studio.running("up", "--address", "10.77.0.1"))
        code = up.wait_for(lambda line: re.fullmatch(r"  [0-9]{3}-[0-9]{4}", line) is not None)
        stack.enter_context(mini.running("join", typed=f"{code}\n\n"))
        up.wait_for("mini is online")
        studio.run("deploy", "demo", "--stages", "2")
        assert hosts_of(studio) == {"169.254.7.1", "169.254.7.2"}
        assert "Paris" in ask(studio)
        before = ring_of(studio)["epoch"]
        ip("link", "set", "tb0", "down", space=spaces[0])
        assert "Paris" in ask(studio)
        assert hosts_of(studio) == {"10.77.0.1", "10.77.0.2"}
        assert ring_of(studio)["epoch"] == before + 1, "a link that fails costs one epoch"


@pytest.mark.sweep
def test_members_whose_first_addresses_are_dead_to_each_other_are_a_ring_over_a_cable(
    tmp_path: Path,
) -> None:
    """As on a Wi-Fi that keeps its clients apart. All reach the coordinator; the pairs were measured before
    there was a ring, and the plan has the order by them."""
    names = ["studio", "book", "mini"]
    with separate_machines(tmp_path, names) as (studio, book, mini), ExitStack() as stack:
        spaces = [f"sealring-{os.getpid()}-{name}" for name in names]
        for port in ("port1", "port2"):
            ip("link", "set", "dev", port, "type", "bridge_slave", "isolated", "on", space=spaces[0])
        up = stack.enter_context(studio.running("up", "--address", "10.77.0.1"))
        code = up.wait_for(lambda line: re.fullmatch(r"  [0-9]{3}-[0-9]{4}", line) is not None)
        for name, one in (("book", book), ("mini", mini)):
            stack.enter_context(one.running("join", typed=f"{code}\n\n"))
            up.wait_for(f"{name} is online")
        measured = links_of(studio, lambda found: len(found) == 3)
        assert measured["book", "mini"] == "", "no way was found"
        assert "" not in (measured["book", "studio"], measured["mini", "studio"])
        ip("link", "add", "tb0", "type", "veth", "peer", "name", "tb0", "netns", spaces[2], space=spaces[1])
        for number, space in enumerate(spaces[1:], 1):
            ip("address", "add", f"169.254.7.{number}/16", "dev", "tb0", space=space)
            ip("link", "set", "tb0", "up", space=space)
        measured = links_of(studio, lambda found: found["book", "mini"] != "")
        assert measured["book", "mini"].startswith("169.254.7.")
        planned = studio.run("deployment", "plan", "demo", "--stages", "3")
        assert "links between nodes" in planned
        assert "found no way" not in studio.run("doctor", "--cluster", status=None)
        studio.run("deploy", "demo", "--member", "book", "--member", "mini", "--stages", "2")
        assert "Paris" in ask(studio)
        assert hosts_of(studio) == {"169.254.7.1", "169.254.7.2"}
        assert ring_of(studio)["epoch"] == 1, "nothing failed before it served"


@pytest.mark.sweep
def test_a_coordinator_is_found_at_whichever_address_it_has(tmp_path: Path) -> None:
    """The first address is dead to the other machine from before it joins. Later the coordinator's machine
    has one address alone, and a new one, as after DHCP. Nobody types anything then."""
    names = ["studio", "mini", "switch"]  # whose cable keeps the first machine's network up
    with separate_machines(tmp_path, names) as (studio, mini, _), ExitStack() as stack:
        spaces = [f"sealring-{os.getpid()}-{name}" for name in names]
        ip("link", "add", "tb0", "type", "veth", "peer", "name", "tb0", "netns", spaces[1], space=spaces[0])
        for number, space in enumerate(spaces[:2], 1):
            ip("address", "add", f"169.254.7.{number}/16", "dev", "tb0", space=space)
            ip("link", "set", "tb0", "up", space=space)
        ip("link", "set", "net0", "down", space=spaces[1])
        up = stack.enter_context(studio.running("up"))
        up.wait_for("coordinator at 10.77.0.1:7700, 169.254.7.1:7700")
        code = up.wait_for(lambda line: re.fullmatch(r"  [0-9]{3}-[0-9]{4}", line) is not None)
        join = stack.enter_context(mini.running("join", typed=f"{code}\n\n"))
        up.wait_for("mini is online")
        studio.run("deploy", "demo", "--stages", "2")
        assert "Paris" in ask(studio)
        assert ring_of(studio)["epoch"] == 1, "nothing failed before it served"

        ip("address", "flush", "dev", "net0", space=spaces[0])
        ip("address", "flush", "dev", "tb0", space=spaces[0])
        ip("address", "add", "169.254.9.9/16", "dev", "tb0", space=spaces[0])
        join.wait_for("does not answer")
        join.wait_for("the coordinator at 169.254.9.9:7700 answers")
        until(lambda: online(studio) == {"studio", "mini"})
        assert "Paris" in ask(studio)
        join.stop()
        again = stack.enter_context(mini.running("join"))
        again.wait_for("the coordinator at 169.254.9.9:7700 answers")


def until(wanted: Callable[[], bool]) -> None:
    while not wanted():
        time.sleep(1)


def online(machine: Machine) -> set[str]:
    """The nodes that are online by `status` of this machine, which may find its coordinator moved."""
    found = json.loads(machine.run("status", "--json", status=None) or '{"nodes": []}')
    return {node["name"] for node in found["nodes"] if node["state"] == "online"}


def links_of(machine: Machine, wanted: Callable[[dict[Any, str]], bool]) -> dict[Any, str]:
    """The hosts over which nodes reach each other, by the sorted names of a pair, once they are `wanted`."""
    while True:
        found = json.loads(machine.run("status", "--json"))
        names = {node["id"]: node["name"] for node in found["nodes"]}
        hosts = {
            tuple(sorted((names[one["caller"]], names[one["called"]]))): one["host"] for one in found["links"]
        }
        if wanted(hosts):
            return hosts


def hosts_of(machine: Machine) -> set[str]:
    """The hosts over which the ring's links go."""
    return {link["address"].partition(":")[0] for link in ring_of(machine)["links"]}


def ring_of(machine: Machine) -> dict[str, Any]:
    """The ring of the one deployment."""
    (found,) = json.loads(machine.run("deployment", "list", "--json"))
    (ring,) = found["rings"]
    assert isinstance(ring, dict)
    return ring
