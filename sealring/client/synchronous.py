"""The client library without asyncio: the same calls, which block."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from sealring.client.asynchronous import OWN_GATEWAY, AsyncClient, AsyncReply
from sealring.client.core import Asks
from sealring.client.portal import Portal
from sealring.client.types import Completion, Delta, Model, RequestOptions, Ring
from sealring.v1 import inference_pb2 as inference


class Reply:
    """One answer: iterate it for its pieces, or take its `result`. Nothing is sent before either.

    Leaving the iteration ends the request everywhere; `close` or `with` does so at once.
    """

    def __init__(self, portal: Portal, reply: AsyncReply) -> None:
        self._reply = reply
        self._deltas = portal.pieces(aiter(reply), reply.aclose)

    @property
    def ring(self) -> Ring | None:
        """The ring that sees the prompt; None before the first piece of the answer."""
        return self._reply.ring

    @property
    def completion(self) -> Completion:
        """The whole answer with usage and finish reason. Raises FailedPrecondition (NOT_FINISHED)."""
        return self._reply.completion

    def __iter__(self) -> Generator[Delta, None, None]:
        return self._deltas

    def result(self) -> Completion:
        """Reads the answer to its end. Raises what `Client.chat` lists."""
        for _ in self._deltas:
            pass
        return self.completion

    def close(self) -> None:
        """Ends the request if it is still under way."""
        self._deltas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(Asks[Reply]):
    """Asks the rings behind a gateway that sees neither prompts nor answers. Several threads may share it.

    Use it as `with Client() as client` on a machine of the cluster, elsewhere as
    `with Client("10.0.0.1:7780", root_sha256="...") as client`.
    """

    def __init__(
        self,
        gateway: str | Sequence[str] = OWN_GATEWAY,
        *,
        root_sha256: str | bytes | None = None,
        min_trust: int | str = 0,
        state_file: str | os.PathLike[str] | None = None,
        timeout: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        user: str = "",
    ) -> None:
        """A client of the gateway at `gateway` (host:port), or of several gateways of one cluster.

        `root_sha256` pins the cluster: the hash of its root key, 64 hexadecimal digits; None: that of the
        cluster which this machine is in. `min_trust` (a level as `software`, or its score) is the least
        trust of a ring, `timeout` the seconds of calls that set none, `state_file` remembers the newest
        roster. `credentials`, `api_key` and `user` are for the gateway. Raises as `AsyncClient`.
        """
        self._inner = AsyncClient(
            gateway,
            root_sha256=root_sha256,
            min_trust=min_trust,
            state_file=state_file,
            timeout=timeout,
            credentials=credentials,
            api_key=api_key,
            user=user,
        )
        self._portal = Portal()

    def ask(self, prompt: inference.Prompt, **options: Unpack[RequestOptions]) -> Reply:
        """Asks with a prompt of the contract as it is; otherwise as `chat`."""
        return Reply(self._portal, self._inner.ask(prompt, **options))

    def models(self) -> list[Model]:
        """The models of the verified roster, by name. Raises RosterError, Unavailable."""
        return self._portal.run(self._inner.models())

    def load(self, model: str, *, keep_alive: int | None = None, within: float | None = None) -> None:
        """Has a model on demand loaded and waits until it serves, `within` seconds at most (None: the
        client's); with `keep_alive` 0 it is unloaded. Raises NotFound (MODEL_NOT_FOUND), Unavailable."""
        self._portal.run(self._inner.load(model, keep_alive=keep_alive, within=within))

    def rings(self) -> list[Ring]:
        """The rings of the verified roster with all of their members. Raises RosterError, Unavailable."""
        return self._portal.run(self._inner.rings())

    def signed_roster(self) -> inference.GetRosterResponse:
        """The roster as it was signed, after its verification. Raises RosterError, Unavailable."""
        return self._portal.run(self._inner.signed_roster())

    def close(self) -> None:
        """Ends what is under way and closes the connections."""
        self._portal.finish(self._inner.close())
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
