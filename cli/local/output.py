"""The output of `demo`: the ring's members and layers, and ways to send it questions."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealring.cli.terminal.output import print_data, print_table
from sealring.mesh.trust.levels import described, level_of

if TYPE_CHECKING:
    from sealring.cli.calls.asking import TimedAnswer
    from sealring.cli.local.cluster import LocalCluster

QUESTION = "What is the capital of France?"
PICTURE_QUESTION = "What is in this picture?"


def own_command() -> str:
    """What to type here in order to run this very `sealring`."""
    own = Path(os.path.abspath(sys.argv[0]))
    found = shutil.which("sealring")
    if found is not None and Path(os.path.abspath(found)) == own:
        return "sealring"
    if own.name != "sealring" or not os.access(own, os.X_OK):
        return shlex.join([sys.executable, "-P", "-m", "sealring.cli"])
    here = Path.cwd()
    return shlex.quote(f"./{own.relative_to(here)}" if own.is_relative_to(here) else str(own))


def report(answer: TimedAnswer, deployment: Any) -> dict[str, Any]:
    """What `demo --once --json` prints. Layers are [first, end), as everywhere."""
    return {
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_s": answer.ttft_s,
        "tok_s": answer.tok_s,
        "suite": suites(deployment),
        "min_trust": level_of(answer.min_trust),
        "ring": ring_places(deployment),
    }


def ring_places(deployment: Any) -> list[dict[str, Any]]:
    """The members with their layers, [first, end), in the order of ranks."""
    return [
        {
            "rank": stage.rank,
            "node": stage.member_name,
            "layers": [stage.first_layer, stage.end_layer],
            "trust": level_of(stage.trust),
        }
        for stage in deployment.plan.rings[0].stages
    ]


def suites(deployment: Any) -> str:
    """The link suites of the deployment's rings; one, unless links differ; none where nothing is linked."""
    return ", ".join(sorted({link.suite for ring in deployment.rings for link in ring.links})) or "none"


def print_ring(deployment: Any) -> None:
    """Prints the members with their layers and trust, and the suite of each link."""
    for ring, state in zip(deployment.plan.rings, deployment.rings, strict=False):
        links = {link.from_rank: link for link in state.links}
        rows = []
        for stage in ring.stages:
            link = links.get(stage.rank)
            sealed = f"-> rank {link.to_rank}: {link.suite}" if link else "no link"
            layers = f"{stage.first_layer}-{stage.end_layer - 1}"
            rows.append([stage.rank, stage.member_name, layers, described(stage.trust), sealed])
        title = f"\nring {ring.ring}, epoch {state.epoch}, minimum trust {described(ring.min_trust)}"
        print_table(["rank", "node", "layers", "trust", "link"], rows, title=title)


def print_ways(cluster: LocalCluster, deployment: Any) -> None:
    """How to talk to it."""
    from sealring.cli.calls.waiting import APIS_OWN, own_sampling

    body = f'{{"model": "{cluster.name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    grpc_body = (
        f'{{"model": "{cluster.name}", "envelope": {{"clear": {{"chat": {{"messages": '
        f'[{{"role": "user", "content": "{QUESTION}"}}]}}}}}}}}'
    )
    print_data(
        f"""
serving {cluster.name} until Ctrl-C; talk to it:

  curl      curl -sN {cluster.http_url}/v1/chat/completions -H 'Content-Type: application/json' \\
              -d '{body}'
            {own_sampling(deployment.plan.profile.card) or APIS_OWN}
  openai    OpenAI(base_url="{cluster.http_url}/v1", api_key="none").chat.completions.create(
              model="{cluster.name}", messages=[{{"role": "user", "content": "{QUESTION}"}}])
  sealring  {own_command()} chat --gateway {cluster.grpc_address} --model {cluster.name}
  grpcurl   grpcurl -plaintext -d '{grpc_body}' \\
              {cluster.grpc_address} sealring.v1.Inference/Generate
  look      {own_command()} status --operator {cluster.operator_bundle}
            curl -s {cluster.http_url}/metrics

logs: {cluster.state_dir / "logs"}"""
    )
