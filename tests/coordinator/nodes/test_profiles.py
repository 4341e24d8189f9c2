"""Profiles of a model, and the error for a model that no node has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sealring.api.errors import error_status
from sealring.coordinator.nodes.profiles import ProfileReply, Profiles, nobody_has
from sealring.mesh.errors import DeadlineExceeded, ModelError, NotFound, SealringError, Unavailable
from sealring.mesh.rpc import to_problem, to_status
from sealring.v1 import membership_pb2
from tests.coordinator.conftest import online, small_profile


async def asked(profiles: Profiles, **more: Any) -> asyncio.Task[dict[str, ProfileReply]]:
    """A question that was sent."""
    task = asyncio.create_task(profiles.ask("org/model", ["alpha"], **more))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("more", [{}, {"ranks": 4}, {"draft": "small", "adapter": "tuned"}])
async def test_a_node_is_asked_and_its_answer_is_its_own(more: dict[str, Any]) -> None:
    questions, session = online()
    profiles = Profiles(questions, timeout=1e9)
    asking = await asked(profiles, **more)
    request = membership_pb2.ProfileRequest(id=1, model="org/model", **more)
    assert (await anext(session.outbox.messages())).profile == request
    questions.answered(session, membership_pb2.ProfileResult(id=1, profile=small_profile()))
    assert await asking == {"alpha": ProfileReply("alpha", small_profile(), None)}


async def test_who_does_not_say_has_no_profile_and_the_reason_is_kept() -> None:
    questions, session = online()
    profiles = Profiles(questions, timeout=1e9)
    problem = to_problem(ModelError("it holds a pipe", reason="UNSUPPORTED_MODEL"))
    unfit = small_profile()
    unfit.layers = 0
    for number, (told, reason) in enumerate(
        (({"problem": problem}, "UNSUPPORTED_MODEL"), ({"profile": unfit}, "BAD_PROFILE")), 1
    ):
        asking = await asked(profiles)
        questions.answered(session, membership_pb2.ProfileResult(id=number, **told))  # type: ignore[arg-type]
        answer = (await asking)["alpha"]
        assert answer.profile is None
        assert answer.error is not None
        assert answer.error.reason == reason
    asking = await asked(profiles)
    questions.gone(session)
    error = (await asking)["alpha"].error
    assert error is not None
    assert error.reason == "MEMBER_OFFLINE"
    silent = (await Profiles(questions, timeout=0.0).ask("org/model", ["alpha"]))["alpha"]
    assert isinstance(silent.error, DeadlineExceeded)
    assert silent.error.message == "no answer in 0 s"


def missing(fetchable: str = "") -> NotFound:
    return NotFound("there is no model", hint="put it", reason="MODEL_NOT_FOUND", fetchable=fetchable)


@pytest.mark.parametrize(
    ("error", "would"),
    [
        (None, False),
        (missing("yes"), True),
        (missing("no"), False),
        (missing(), False),
        (ModelError("no", reason="UNSUPPORTED_MODEL", fetchable="yes"), False),
    ],
)
def test_a_model_that_is_not_there_is_fetched_where_a_member_has_it(error: Any, would: bool) -> None:
    assert ProfileReply("a", None, error).would_fetch is would


@pytest.mark.parametrize(
    ("model", "errors", "hint", "fetchable"),
    [
        ("m", [missing()], "put the model into the nodes' model folders, or name it as they do", ""),
        ("m", [missing("yes")], "put the model into the nodes' model folders, or name it as they do", ""),
        ("org/m", [missing()], "put the model into the nodes' model folders, or name it as they do", ""),
        ("org/m", [missing(), missing("yes")], "fetch it: sealring model pull org/m", "yes"),
        ("org/m", [missing(), ModelError("no", hint="first"), ModelError("no", hint="then")], "first", ""),
        ("org/m", [ModelError("no"), ModelError("no", hint="then")], "then", ""),
        ("org/m", [missing("yes"), ModelError("no", hint="h")], "fetch it: sealring model pull org/m", "yes"),
    ],
)
def test_what_helps_where_no_node_has_the_model(
    model: str, errors: list[Any], hint: str, fetchable: str
) -> None:
    told = nobody_has(model, [ProfileReply("a", None, error) for error in errors], {"a": "alpha"})
    assert (told.reason, told.hint) == ("UNKNOWN_MODEL", hint)
    assert (told.metadata["param"], told.metadata.get("fetchable", "")) == ("model", fetchable)
    assert told.message.startswith(f"no node can serve the model '{model}' (alpha: {errors[0].message}")


def test_a_model_is_not_fetched_where_its_adapter_is_missing() -> None:
    lacking = NotFound("no adapter", hint="put its folder", reason="ADAPTER_NOT_FOUND", fetchable="yes")
    told = nobody_has("org/m", [ProfileReply("a", None, lacking)], {"a": "alpha"})
    assert (told.hint, told.metadata["fetchable"]) == ("put its folder", "")
    assert ProfileReply("a", None, lacking).would_fetch


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("no answer in 60 s"),
        Unavailable("the member is not online"),
        NotFound("no readable folder has it", hint="check the volume", reason="MODEL_FOLDER_UNREADABLE"),
    ],
)
def test_a_model_that_a_node_may_have_is_refused_for_now(error: SealringError) -> None:
    """In every API: clients of a model on demand get this error."""
    answers = [ProfileReply("a", None, missing("yes")), ProfileReply("b", None, error)]
    told = nobody_has("org/m", answers, {"a": "alpha", "b": "beta"})
    assert isinstance(told, Unavailable)
    assert "(alpha: there is no model; beta: " in told.message
    assert (told.reason, told.hint[:15]) == ("NODES_SILENT", "try again later")
    assert (error_status(told), to_status(told).code) == (503, 14)
    assert int(told.metadata["retry_after"]) > 0


def test_a_long_name_is_cut_and_who_has_the_model_is_not_told() -> None:
    name = "o/" + "m" * 300
    answers = [ProfileReply("a", small_profile(), None), ProfileReply("b", None, missing("yes"))]
    told = nobody_has(name, answers, {})
    assert told.message == f"no node can serve the model {name[:256]!r} (b: there is no model)"
    assert told.hint == f"fetch it: sealring model pull {name[:256]}"


@pytest.mark.parametrize("reason", ["DRAFT_NOT_ALIKE", "DRAFT_NOT_REVERSIBLE"])
def test_a_draft_model_that_does_not_suit_is_the_error(reason: str) -> None:
    refused = ModelError("small cannot guess for m", reason=reason, hint="take another")
    answers = [ProfileReply("a", None, missing()), ProfileReply("b", None, refused)]
    assert nobody_has("org/m", answers, {}) is refused
