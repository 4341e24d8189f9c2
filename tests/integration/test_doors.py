"""Programs on a member: they ask and look by the member's own certificate, until the member is evicted."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from asking import OverHttp, Sealed
from machines import Machine, Running

pytestmark = pytest.mark.integration
QUESTION = "What is the capital of France?"


class Two(NamedTuple):
    first: Machine
    up: Running
    member: Machine
    join: Running
    url: str


def url_of(join: Running) -> str:
    line = join.wait_for("programs ask at ")
    return line.partition("programs ask at ")[2].partition("/v1")[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("doors")
    first, member = Machine(folder / "one"), Machine(folder / "two")
    with ExitStack() as stack:
        up = stack.enter_context(
            first.running("up", "--address", "127.0.0.1", "--name", "one", "--model", "demo")
        )
        up.wait_for("demo is serving")
        token = first.run("token", "create").split()[-1]
        join = stack.enter_context(member.running("join", token, "--name", "two"))
        yield Two(first, up, member, join, url_of(join))


def completion(url: str, key: str) -> dict[str, object]:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def proxy_of(two: Two) -> psutil.Process | None:
    """The proxy that runs beside the member's node."""
    for one in two.join.family():
        with suppress(psutil.Error):  # it has just ended
            if "proxy" in one.cmdline():
                return one
    return None


def root_of(machine: Machine) -> str:
    described = json.loads((machine.state / "node" / "client" / "member.json").read_text())
    return str(described["root_sha256"])


def test_a_member_asks_and_looks_and_changes_nothing(two: Two) -> None:
    assert "Paris" in two.member.run("chat", QUESTION)
    key = (two.member.state / "proxy.key").read_text().strip()
    assert "Paris" in json.dumps(completion(two.url, key))
    assert "demo-0" in two.member.run("status")
    (used,) = json.loads(two.member.run("usage", "--json"))
    assert (used["requests"] > 0, used["label"]) == (True, "two")
    assert "layers" in two.member.run("deployment", "plan", "demo", "--name", "another")
    assert two.url in two.member.run("connect", "opencode")
    two.member.run("token", "create", status=6)


def test_others_on_the_machine_ask_nothing(two: Two) -> None:
    for key in ("", "none", "srk_aaaaaaaaaaaaaaaa_" + "a" * 52):
        with pytest.raises(urllib.error.HTTPError) as caught:
            completion(two.url, key)
        assert caught.value.code == 401
        caught.value.close()


def test_the_first_machine_goes_on_asking_once_a_friend_has_a_key(two: Two) -> None:
    """And once the friend has none again."""
    assert "--lan" in two.first.said("key", "create", "--label", "anna")
    (friend,) = [one for one in json.loads(two.first.run("key", "list", "--json")) if one["label"] == "anna"]
    two.first.run("key", "revoke", friend["id"])
    assert "Paris" in two.first.run("chat", QUESTION)
    assert "demo" in two.first.run("usage")
    shown = two.first.run("connect", "opencode")
    assert (two.first.state / "gateway.key").read_text().strip() in shown
    assert "Paris" in two.member.run("chat", QUESTION), "members are known by their certificates"


def test_the_proxy_is_small_at_rest(two: Two) -> None:
    proxy = proxy_of(two)
    assert proxy is not None
    assert proxy.memory_full_info().uss < 60 << 20


def test_it_comes_back_at_the_same_port_until_its_machine_is_evicted(two: Two) -> None:
    """A copy of the certificate is of no use then."""
    proxy = proxy_of(two)
    assert proxy is not None
    proxy.kill()
    while (again := proxy_of(two)) is None or again.pid == proxy.pid:
        time.sleep(0.1)
    assert "Paris" in two.member.run("chat", QUESTION)
    two.join.stop()
    with two.member.running("join") as joined:
        assert url_of(joined) == two.url
        assert two.url in two.member.run("connect", "opencode")
        thief = Machine(two.first.folder.parent / "thief")
        shutil.copytree(two.member.state / "node" / "client", thief.state / "node" / "client")
        assert "Paris" in thief.run("chat", "--root-sha256", root_of(two.member), QUESTION)
        two.first.run("node", "evict", "two")
        joined.process.wait()
        assert "Paris" not in thief.run("chat", "--root-sha256", root_of(two.member), QUESTION, status=None)
        assert "demo" not in thief.run("status", status=None)


def gateways_of(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(machine.run("status", "--json"))["gateways"]
    return found


def join_at(number: int, token: str) -> tuple[str, ...]:
    """A machine with an address of its own, so that gateways know which node is beside them."""
    return "join", token, "--name", ("two", "three")[number - 2], "--address", f"127.0.0.{number}"


def kill(up: Running) -> None:
    """As a machine that loses its power."""
    for one in up.family():
        with suppress(psutil.Error):
            one.kill()
    up.process.wait()


def newest(running: Running, words: str) -> str:
    return next(line for line in reversed(running.lines) if words in line)


def test_a_standby_goes_on_where_the_first_machine_was(tmp_path: Path) -> None:
    """The ring is on the other two. Their machines say what to type. Answers go on in whose midst the first
    machine goes, the second takes over and the first comes back: none differs, and receipts hold.
    """
    first, second, third = (Machine(tmp_path / name) for name in ("one", "two", "three"))
    with ExitStack() as stack:
        up = stack.enter_context(first.running("up", "--address", "127.0.0.1", "--name", "one"))
        up.wait_for("sealring join")
        backup = tmp_path / "backup"
        first.run("coordinator", "backup", str(backup))
        token = first.run("token", "create", "--uses", "2").split()[-1]
        two = stack.enter_context(second.running(*join_at(2, token), "--standby", str(backup)))
        three = stack.enter_context(third.running(*join_at(3, token)))
        for name in ("two", "three"):
            up.wait_for(f"{name} is online")
        urls = url_of(two), url_of(three)
        while not any(one["name"] == "two-gateway" and one["addresses"] for one in gateways_of(third)):
            time.sleep(0.2)
        first.run("deploy", "demo", "--stages", "2", "--member", "two", "--member", "three")
        key = (third.state / "proxy.key").read_text().strip()
        root, ports = root_of(third), json.loads((second.state / "ports.json").read_text())
        programs = [
            OverHttp(root, urls[1], "/v1/chat/completions", key),
            OverHttp(root, urls[0], "/v1/messages", "none"),
            Sealed(root, f"127.0.0.1:{ports['gateway']}"),
        ]
        undisturbed = programs[0].ask().result()
        answers = [one.ask() for one in programs]
        kill(up)
        three.wait_for("does not answer")
        assert "Paris" in third.run("chat", QUESTION)
        assert "sealring coordinator promote" in third.said("status")
        assert "go on for" in third.said("status")
        assert "serves demo: layers" in third.said("status")
        alone = second.run()
        assert "and its standby" in alone, alone
        assert "type on this machine: sealring coordinator promote" in alone, alone
        answers += [one.ask() for one in programs]
        second.run("coordinator", "promote")
        three.wait_for(lambda _: newest(three, "the coordinator at").endswith(" answers"))
        assert "demo-0" in third.run("status")
        assert (url_of(two), url_of(three)) == urls
        second.run("token", "create")
        answers += [one.ask() for one in programs]
        back = stack.enter_context(first.running("up", "--address", "127.0.0.1", "--name", "one"))
        back.wait_for("This machine goes on as a member")
        back.wait_for(lambda line: line.startswith("the coordinator at") and line.endswith(" answers"))
        assert [one.result() for one in answers] == [undisturbed] * 9
        assert "Paris" in first.run("chat", QUESTION)
        assert "this machine is the node one" in first.run()
        url_of(back)
        assert (first.state / "proxy.key").read_text().strip() in first.run("connect", "opencode")
        back.stop()
        again = stack.enter_context(first.running("up", "--address", "127.0.0.1", "--name", "one"))
        again.wait_for("it goes on as a member")
        again.wait_for(lambda line: line.startswith("the coordinator at") and line.endswith(" answers"))
        assert "Paris" in first.run("chat", QUESTION)
        assert not (first.state / "coordinator").exists(), "no second cluster"
