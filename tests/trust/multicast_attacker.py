"""Attacks the discovery of clusters from a machine on their network, until its standard input ends.

`python multicast_attacker.py ATTACK HOST ROOT ADDRESS`: `HOST` is its own address, `ROOT` and `ADDRESS` are
those of the cluster that it attacks. It prints a line once it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
from ipaddress import IPv4Address

from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from sealring.mesh.crypto import encode_base32
from sealring.mesh.member import MAX_HEARD, SERVICE
from sealring.mesh.system.addresses import parse_address

GROUP, PORT = "224.0.0.251", 5353
NAME = b"\x09_sealring\x04_tcp\x05local\x00"
PAUSE = 0.02


def announce(
    multicast: AsyncZeroconf, label: str, hosts: list[str], port: int, **properties: str | bytes
) -> None:
    """Answers questions with this instance, and checks nothing of it."""
    info = AsyncServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        port=port,
        addresses=[IPv4Address(host).packed for host in hosts],
        properties={"v": "1", **properties},
        server=f"{label}.local.",
    )
    multicast.zeroconf.registry.async_add(info)


async def lies(host: str, root: str, address: str) -> None:
    """Another root; the cluster's own root elsewhere and under other names; what is no announcement."""
    port = parse_address(address)[1]
    multicast = AsyncZeroconf(interfaces=[host], ip_version=IPVersion.V4Only)
    announce(multicast, "other-root", [host], port, name="home", root=encode_base32(bytes(32)))
    announce(multicast, "nobody-there", [host], 9, name="home", root=root)
    announce(multicast, "elsewhere", ["8.8.8.8", "127.0.0.1", "10.77.0.255"], port, name="home", root=root)
    announce(multicast, "another-name", [parse_address(address)[0]], port, name="evil", root=root)
    announce(multicast, "letters", [host], port, name=b"\x1b[2Jhome\n", root=root)
    announce(multicast, "long", [host], port, name="a" * 200, root="a" * 200)
    announce(multicast, "nothing", [host], port)
    await begun()


async def flood(host: str, root: str, address: str) -> None:
    """Many more instances than anybody looks at, half of them of the cluster's own root."""
    multicast = AsyncZeroconf(interfaces=[host], ip_version=IPVersion.V4Only)
    for number in range(4 * MAX_HEARD):
        claimed = root if number % 2 else encode_base32(number.to_bytes(32, "big"))
        announce(multicast, f"n{number}", [host], 9, name="home", root=claimed)
    await begun()


async def packets(host: str, root: str, address: str) -> None:
    """Hostile lengths, counts, compression and characters, as raw messages of multicast DNS."""
    draw = random.Random(76)
    name = NAME
    answer = struct.pack(">HHHHHH", 0, 0x8400, 0, 1, 0, 0)

    def record(owner: bytes, kind: int, data: bytes, length: int | None = None) -> bytes:
        head = struct.pack(">HHIH", kind, 0x8001, 120, len(data) if length is None else length)
        return answer + owner + head + data

    hostile = [
        b"",
        b"\x00",
        answer,
        struct.pack(">HHHHHH", 0, 0x8400, 65535, 65535, 65535, 65535) + name,
        answer + b"\xc0\x0c",  # a name that points to itself
        answer + b"\xc0\x0e\xc0\x0c" + bytes(10),  # two that point to each other
        record(name, 12, b"\xc0\x0c"),
        record(name, 12, b"\x3f" + b"a" * 63 + b"\xc0\x0c"),
        record(name, 12, b"\x40" + b"a" * 64),
        record(b"\x3f" + b"a" * 63 + b"\x3f" + b"b" * 63 + name, 16, b"\xff" + b"x" * 255),
        record(name, 16, b"\xff" + b"x", 2),
        record(name, 16, b"x", 65535),
        record(name, 33, b"\x00" * 3),
        record(name, 1, b"\x00" * 5),
        record(b"\x05\x1b[2J\n" + name, 12, b"\x05\x1b[2J\n" + name),
        record(name, 12, b"\x04home" + name) + b"\xff" * 8000,
        *(draw.randbytes(draw.randrange(1400)) for _ in range(50)),
        *(answer + draw.randbytes(draw.randrange(1400)) for _ in range(50)),
    ]
    await begun(send(host, hostile))


async def replay(host: str, root: str, address: str) -> None:
    """Sends again what the cluster announced, for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("", PORT))
        group = IPv4Address(GROUP).packed + IPv4Address(host).packed
        listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        listening.setblocking(False)
        heard: list[bytes] = []
        question = struct.pack(">HHHHHH", 0, 0, 1, 0, 0, 0) + NAME + b"\x00\x0c\x00\x01"
        asking = asyncio.create_task(send(host, [question], 0.5))
        while not heard:
            said = await asyncio.get_running_loop().sock_recv(listening, 9000)
            heard += [said] * (root.encode() in said and said[2] & 0x80 == 0x80)
        asking.cancel()
    await begun(send(host, heard))


async def connections(host: str, root: str, address: str) -> None:
    """Connections to the join port, more than it takes, made again as they are closed."""
    where = parse_address(address)

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*where)
                await reader.read()
                writer.close()
            await asyncio.sleep(PAUSE)

    crowd = [asyncio.create_task(one()) for _ in range(400)]
    await begun()
    del crowd


async def send(host: str, messages: list[bytes], pause: float = PAUSE) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, IPv4Address(host).packed)
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sending.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sending.bind((host, PORT))
        while True:
            for message in messages:
                with contextlib.suppress(OSError):  # too long for one datagram of this interface
                    sending.sendto(message, (GROUP, PORT))
            await asyncio.sleep(pause)


async def begun(*meanwhile: object) -> None:
    work = [asyncio.ensure_future(one) for one in meanwhile]  # type: ignore[call-overload]
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for one in work:
        one.cancel()


ATTACKS = {one.__name__: one for one in (lies, flood, packets, replay, connections)}

if __name__ == "__main__":
    attack, *arguments = sys.argv[1:]
    asyncio.run(ATTACKS[attack](*arguments))
