"""A machine that looks for clusters, or tries codes at one, for tests/trust/test_multicast.py.

`python newcomer.py look` or `python newcomer.py try ROOT ADDRESS CODE...`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from sealring.mesh.crypto import decode_base32, encode_base32
from sealring.mesh.errors import SealringError
from sealring.mesh.member import Offer, find_clusters, token_for
from sealring.mesh.system.networks import own_addresses


async def look() -> list[object]:
    """Name, root hash and addresses of each cluster that is offered."""
    found = await find_clusters([one.host for one in own_addresses()])
    return [[one.name, encode_base32(one.root_sha256), list(one.addresses)] for one in found]


async def attempt(root: str, address: str, codes: list[str]) -> list[str]:
    """Tries all codes at once; for each of them "token", or the reason of the refusal."""
    offer = Offer(decode_base32(root, size=32), "home", (address,))

    async def one(code: str) -> str:
        try:
            await token_for(offer, code)
        except SealringError as error:
            return error.reason
        return "token"

    return list(await asyncio.gather(*map(one, codes)))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    said = look() if what == "look" else attempt(rest[0], rest[1], rest[2:])
    sys.stdout.write(json.dumps(asyncio.run(said)))
