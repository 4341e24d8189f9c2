"""The hub's list of files is checked before anything is fetched: somebody may answer in the hub's place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import SealringError
from sealring.node.models.listing import HubFile, address, files_of, found_in

COMMIT, BLOB, SHA256 = "c" * 40, "b" * 40, "a" * 64


def entry(name: str, size: Any = 2, **more: Any) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "blobId": BLOB} | more


def weights(name: str, size: Any = 1 << 30, sha256: Any = SHA256) -> dict[str, Any]:
    return entry(name, size, lfs={"sha256": sha256, "size": size})


def answer(*entries: Any, **more: Any) -> list[bytes]:
    told = {"sha": COMMIT, "siblings": [entry("config.json"), *entries]} | more
    text = json.dumps(told).encode()
    return [text[start : start + 1000] for start in range(0, len(text), 1000)]


def reason(pieces: Any, commit: str = "") -> str:
    with pytest.raises(SealringError) as raised:
        files_of("org/model", commit, pieces)
    assert raised.value.hint
    return raised.value.reason


ELSEWHERE = (
    *("a/b.json", "../x.json", "..", "/config.json", "1_Pooling/", "1_Pooling/../config.json"),
    *("1_Pooling/a/config.json", "2_Dense/model.safetensors", "1_Pooling/other.json", "onnx/config.json"),
    *(
        "1_.._Pooling/config.json",
        "./1_Pooling/config.json",
        "chat_templates/.jinja",
        "1_Pooling\\config.json",
    ),
)


def test_the_files_of_a_model_and_no_others() -> None:
    pieces = answer(
        weights("model.safetensors"),
        entry("run.py", None),
        *map(entry, (*ELSEWHERE, "1_Pooling/config.json", "additional_chat_templates/tool_use.jinja")),
    )
    assert files_of("org/model", "", pieces) == (
        COMMIT,
        (
            HubFile("1_Pooling/config.json", 2, "", BLOB),
            HubFile("additional_chat_templates/tool_use.jinja", 2, "", BLOB),
            HubFile("config.json", 2, "", BLOB),
            HubFile("model.safetensors", 1 << 30, SHA256, BLOB),
        ),
    )


def test_the_address_holds_what_it_names() -> None:
    assert address("https://hub", "org/model", "") == "https://hub/api/models/org/model?blobs=true"
    assert address("https://hub", "org/a?b", "c/d") == (
        "https://hub/api/models/org/a%3Fb/revision/c%2Fd?blobs=true"
    )


@pytest.mark.parametrize(
    "bad",
    [
        entry("a.json", None),
        entry("a.json", -1),
        entry("a.json", True),
        entry("a.json", "2"),
        entry("a.json", 65 << 20),
        entry("a.json", blobId=None),
        entry("a.json", blobId=7),
        entry("a.json", lfs=[]),
        weights("a.safetensors", sha256="A" * 64),
        weights("a.safetensors", sha256=None),
        entry("config.json"),
        entry("CONFIG.json"),
        entry(7),  # type: ignore[arg-type]
        {"size": 2},
        "config.json",
        None,
    ],
)
def test_an_entry_that_is_not_to_be_used(bad: Any) -> None:
    assert reason(answer(bad)) == "BAD_HUB_ANSWER"


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"[]"],
        [b"{"],
        [b"\xff"],
        [b"[" * 100_000],
        [b'{"sha": "%b"}' % COMMIT.encode()],
        answer(siblings=None),
        answer(sha=None),
        answer(sha="main"),
    ],
)
def test_an_answer_that_is_no_list(pieces: list[bytes]) -> None:
    assert reason(pieces) == "BAD_HUB_ANSWER"


def test_a_list_of_another_commit() -> None:
    assert reason(answer(), "d" * 40) == "BAD_HUB_ANSWER"


def test_a_repository_without_a_model() -> None:
    assert reason(answer(siblings=[entry("README.md")])) == "MODEL_NOT_FOUND"
    found = [entry("adapter_config.json"), weights("adapters.safetensors")]
    assert len(files_of("org/tuned", "", answer(siblings=found))[1]) == 2


def test_more_than_can_be_passed_on() -> None:
    many = [weights(f"model-{number}.safetensors", 1) for number in range(1024)]
    assert reason(answer(*many)) == "MODEL_TOO_LARGE"
    assert len(files_of("org/model", "", answer(*many[1:]))[1]) == 1024
    large = [weights(f"model-{number}.safetensors", 1 << 40) for number in range(3)]
    assert reason(answer(*large)) == "MODEL_TOO_LARGE"


def test_a_list_without_an_end() -> None:
    """Reading stops once the list is too long."""
    came = 0

    def pieces() -> Any:
        nonlocal came
        while True:
            came += 1 << 20
            yield b" " * (1 << 20)

    assert reason(pieces()) == "MODEL_TOO_LARGE"
    assert came == 9 << 20


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
IDS = (
    st.sampled_from(["org/a", "gpt2", "../etc", "org/..\n", "a b", "", "-x", "x" * 300, "org/\x1b[2J"]) | ANY
)
LISTED = st.dictionaries(st.sampled_from(["downloads", "likes", "other"]), ANY)


@given(st.lists(st.builds(lambda one, name: one | {"id": name}, LISTED, IDS) | ANY) | ANY, st.integers(0, 5))
def test_whatever_a_search_finds_is_well_formed_names_and_numbers(told: Any, most: int) -> None:
    text = json.dumps(told).encode()
    pieces = [text[:7], text[7:]]
    if not isinstance(told, list):
        with pytest.raises(SealringError, match="no list of models"):
            found_in(pieces, most)
        return
    found = found_in(pieces, most)
    assert len(found) <= most
    for one in found:
        assert one.keys() == {"id", "downloads", "likes"}
        assert one["id"].isprintable()
        assert not {" ", "|"} & {*one["id"]}
        assert (type(one["downloads"]), type(one["likes"])) == (int, int)


@pytest.mark.parametrize("text", [b"", b"[", b"[" * 100_000, b"\xff", b"[" + b" " * (9 << 20)])
def test_what_is_no_list_of_models_is_refused(text: bytes) -> None:
    with pytest.raises(SealringError) as caught:
        found_in([text], 5)
    assert caught.value.reason == "BAD_HUB_ANSWER"
