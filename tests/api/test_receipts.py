"""Answers that a gateway has changed or made up beside a true receipt, in the form of each API."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from wholeanswers import CASES, NAMES, SIGNED, TOKEN, Case, answer, asked, forged, part_of, places, seen

from sealring.api.answers import Choice
from sealring.api.chat import ask_chat
from sealring.api.receipts import APIS, CHAT, Answered, ChoiceDigests, parse_body, read_answer
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.prompt.images import NOTE
from sealring.mesh.receipt.digests import AnswerHash, request_digest
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.v1 import inference_pb2 as inference

RECEIPTS = {NAME: receipts_json([SIGNED])}
REQUESTS_OWN = {
    "/v1/responses": answer(CASES["response"]).keys()
    - {"object", "status", "error", "incomplete_details", "store", "output"},
    "/v1/messages": {"stop_sequence"},
}
"""Parts of the request in its answer, which are compared with `--request` only."""

BEGUN = ("content_block_start", "response.output_item.added")
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def read(case: Case, value: dict[str, Any], *, body: bool = True) -> Answered:
    return read_answer(value, case.api, {"model": "demo", **case.body} if body else None)


def deltas(choice: Choice) -> list[inference.Delta]:
    """A stream of the choice."""
    found = []
    for kind, piece, _ in choice.parts():
        delta = inference.Delta()
        if not isinstance(piece, str):
            delta.parsed.tool_calls.append(piece)
        elif kind == "text":
            delta.text = piece
        else:
            delta.parsed.reasoning = piece
        found.append(delta)
    return found


def signed(case: Case) -> list[ChoiceDigests]:
    """The hashes that the head signs for what the model has said."""
    found = []
    for one in case.choices:
        answer = AnswerHash()
        for kind, piece, _ in one.parts():
            if isinstance(piece, str):
                answer.add(**{"text": "", kind: piece})
            else:
                answer.add("", "", [piece])
        told = answer.digests()
        finish = "length" if case.finish == inference.FINISH_REASON_LENGTH else "stop"
        order = told.order if case.api in ("/v1/messages", "/v1/responses") else None
        found.append(ChoiceDigests(told.text, told.reasoning, told.calls, finish, order))
    return found


def taken(case: Case, value: dict[str, Any], *, body: bool) -> bool:
    """Whether an answer is believed to be the one that was signed."""
    try:
        found = read(case, value, body=body)
    except ReceiptError:
        return False
    pairs = zip(found.choices, signed(case), strict=True)
    same = all(one in (true, dataclasses.replace(true, calls=None)) for one, true in pairs)
    return same and found.model == "demo"


@EVERY
def test_a_true_answer_is_what_was_signed(case: Case) -> None:
    found = read(case, answer(case))
    request = asked(case).request
    assert (found.choices, found.model) == (signed(case), "demo")
    assert found.asked is not None
    prompt, limit = request.envelope.clear, request.max_tokens
    assert list(found.asked[0].requests) == [
        request_digest(prompt, limit),
        request_digest(prompt, limit, unnamed=False),
    ]
    assert "usage" in found.unsigned or "eval_count" in found.unsigned
    bare = read(case, answer(case), body=False)
    assert bare.asked is None
    for one, true in zip(bare.choices, signed(case), strict=True):
        assert (one.text, one.reasoning, one.finish) == (true.text, true.reasoning, true.finish)
        assert one.calls in (true.calls, None)


@EVERY
@pytest.mark.parametrize("body", [True, False])
def test_an_answer_with_nothing_left_out_of_it_is_taken_as_programs_write_it_again(
    case: Case, body: bool
) -> None:
    """Clients write what they have read with members of null, and leave out members of null."""
    value = answer(case)
    for at, part in [(at, part_of(value, at)) for at in places(value)]:
        if isinstance(part, dict) and not {"input", "arguments", "logprobs"} & set(at):
            for name in [one for one, item in part.items() if item is None]:
                del part[name]
            part["container"] = None
    assert taken(case, value, body=body)


@EVERY
def test_numbers_are_taken_as_javascript_writes_them(case: Case) -> None:
    """It knows no 1.0: the SDKs of Node and browsers write 1 again, also for the log-probability of 0."""
    said = json.dumps(answer(case)).replace(str(TOKEN.logprob), "0.0")
    assert taken(case, json.loads(said, parse_float=lambda number: int(float(number))), body=True)


def test_log_probabilities_that_were_not_asked_for_are_refused() -> None:
    case, asked_for = CASES["generate"], answer(CASES["ollamas"])
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read(case, answer(case) | {"logprobs": asked_for["logprobs"]})


def without_calls(told: dict[str, Any]) -> list[Any]:
    """What a reader sees of a response, of its calls no more than where they stand."""
    return ["a call" if "call" in str(one.get("output.type")) else one for one in told["output"]]


@EVERY
@pytest.mark.parametrize("body", [True, False])
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_a_reader_sees_is_believed_unless_it_was_signed(
    case: Case, body: bool, data: st.DataObject
) -> None:
    true = answer(case)
    value = data.draw(forged(true))
    if taken(case, value, body=body):
        told, expected = json.loads(seen(case.api, value)), json.loads(seen(case.api, true))
        for name in REQUESTS_OWN.get(case.api, set()) & true.keys() if not body else ():
            told.pop(name, None)
            expected.pop(name, None)
        if read(case, value, body=body).choices[0].calls is None:  # which the command says
            told["output"], expected["output"] = without_calls(told), without_calls(expected)
        assert json.dumps(told, sort_keys=True) == json.dumps(expected, sort_keys=True)


@pytest.mark.parametrize(
    ("name", "parts"), [("messages between calls", "content"), ("response between calls", "output")]
)
def test_no_other_order_is_believed(name: str, parts: str) -> None:
    case = CASES[name]
    true = answer(case)
    assert len(true[parts]) == 6
    for turned in itertools.permutations(true[parts]):
        value = true | {parts: list(turned)}
        same = seen(case.api, value) == seen(case.api, true)
        assert taken(case, value, body=True) == same, [part["type"] for part in turned]
    whole = asked(case).render(inference.Started(request_id="r1", model="demo"))
    streamed = b"".join(whole.delta(delta) for delta in deltas(case.choices[0]))
    told = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith("data: ")]
    kinds = [(one.get("content_block") or one["item"])["type"] for one in told if one["type"] in BEGUN]
    assert kinds == [part["type"] for part in true[parts]]


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if not one.api.startswith("/api/")])
def test_usage_holds_the_numbers_that_the_api_has_and_no_words(name: str) -> None:
    """No receipt covers it."""
    case = CASES[name]
    true = answer(case)
    for changed in ({"note": "Gone."}, dict.fromkeys(true["usage"], "Gone.")):
        assert not taken(case, true | {"usage": true["usage"] | changed}, body=True)


@EVERY
def test_no_member_can_be_put_anywhere_in_an_answer(case: Case) -> None:
    """Every name that some reader looks for, at every level, beside what is true; once in items of a kind."""
    value = answer(case)
    true, tried = seen(case.api, value), set[Any]()
    for at in places(answer(case)):
        if not isinstance(holder := part_of(value, at), dict):
            continue
        kind = (*(one for one in at if isinstance(one, str)), holder.get("type"))
        if kind in tried:
            continue
        tried.add(kind)
        before = dict(holder)
        for name, leaf in itertools.product(NAMES, ("Gone.", [{"type": "text", "text": "Gone."}])):
            if before.get(name) != leaf:
                holder[name] = leaf
                assert not taken(case, value, body=True) or seen(case.api, value) == true, (at, name)
                holder.clear()
                holder.update(before)


@EVERY
@pytest.mark.parametrize("api", APIS)
def test_an_answer_is_read_as_one_of_the_api_that_was_asked_and_of_no_other(case: Case, api: str) -> None:
    """It may have the form of another one beside it: its reader reads the API that it has asked."""
    if api == case.api:
        return
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read_answer(answer(case), api)
    for other in CASES.values():
        if other.api == api and len(other.choices) == len(case.choices):
            forged_text = json.dumps(answer(other)).replace("here", "gone").replace("Here", "Gone")
            both = {**json.loads(forged_text), **answer(case)}
            with refused("RECEIPT_MALFORMED", ReceiptError):
                read_answer(both, api)


def test_a_name_that_is_in_an_object_twice_is_refused() -> None:
    """One reader takes the first, another one the last."""
    for text in (
        '{"a": 1, "a": 1}',
        '{"a": {"b": [{"c": 1, "c": 2}]}}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '\ufeff{"a": 1}',
        "[]",
        "[" * 100_000,
    ):
        with refused("BAD_FILE", InvalidInput):
            parse_body(text.encode(), "the answer")
    with refused("BAD_FILE", InvalidInput):
        parse_body('{"a": 1}'.encode("utf-16"), "the answer")
    assert parse_body(b'{"a": [{"a": 1}]}', "the answer") == {"a": [{"a": 1}]}


def test_a_receipt_alone_has_nothing_beside_it() -> None:
    case = CASES["response"]
    assert read(case, RECEIPTS[NAME]).choices == []
    assert read(case, RECEIPTS[NAME]).asked == read(case, answer(case)).asked
    with refused("RECEIPT_MISSING", ReceiptError):
        read(case, {**RECEIPTS[NAME], "output_text": "Hi"})
    for at in places(RECEIPTS[NAME]):
        value = copy.deepcopy(RECEIPTS[NAME])
        holder = part_of(value, at)
        if at and isinstance(holder, dict):
            holder["text"] = "Gone."
            with refused("RECEIPT_MALFORMED", ReceiptError):
                read(case, value)


def test_what_sealring_chat_prints_is_read_by_its_own_name() -> None:
    printed = {
        **{"answer": "Hi", "model": "demo", "ring": "demo-0", "prompt_tokens": 1, "completion_tokens": 2},
        **{"finish": "stop", "sealed": True, "ttft_s": 0.1, "tok_s": 3, "logprobs": [], "min_trust": "none"},
        **RECEIPTS,
    }
    assert {"ring", "sealed", "tok_s"} < set(read_answer(printed, CHAT).unsigned)
    assert not {"answer", "model", "finish"} & set(read_answer(printed, CHAT).unsigned)
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read_answer({**printed, NAME: receipts_json([SIGNED, SIGNED])}, CHAT)
    (found,) = read_answer(printed, CHAT).choices
    assert (found.reasoning, found.calls, found.finish) == (None, None, "stop")
    for changed in ({**printed, "text": "Ho"}, {**printed, "answer": ["Hi"]}, {**printed, "sealed": 1}):
        with refused("RECEIPT_MALFORMED", ReceiptError):
            read_answer(changed, CHAT)
    with refused("BAD_OPTION", InvalidInput):
        read_answer(printed, CHAT, {"messages": []})
    with refused("BAD_OPTION", InvalidInput):
        read_answer(printed, "/v1/nothing")


def test_a_stop_string_that_was_not_asked_for_is_refused() -> None:
    case = CASES["message"]
    value = answer(case)
    assert "stop_sequence" in read(case, value).unsigned
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read(case, value | {"stop_sequence": "."})


def test_calls_under_names_of_the_clients_are_compared_by_its_request_alone() -> None:
    """Codex names tools by namespace, and has custom ones, which the model calls otherwise."""
    case = CASES["responses"]
    assert read(case, answer(case)).choices[0].calls == signed(case)[0].calls
    assert read(case, answer(case), body=False).choices[0].calls is None, (
        "without the request it is not known"
    )
    value = answer(case)
    (call,) = [one for one in value["output"] if one.get("namespace")]
    call["namespace"] = "other"
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read(case, value)


def test_each_choice_of_each_prompt_has_a_place_of_its_own() -> None:
    body = {"prompt": ["x", "x"], "n": 2}
    case = Case("/v1/completions", body, tuple(map(type(CASES["chat"].choices[0]), "abcd")))
    found = read(case, answer(case)).asked or []
    assert [one.choice for one in found] == [0, 1, 0, 1]
    assert found[0].requests == found[3].requests


def test_a_request_with_earlier_images_may_have_words_in_their_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    told = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    words = [{"role": "user", "content": f"What is it?\n{NOTE}"}, *told[1:]]

    def asked_for(messages: list[Any]) -> Any:
        value = {"model": "demo", "messages": messages, "max_tokens": 9}
        (found,) = read_answer(RECEIPTS[NAME], "/v1/chat/completions", value).asked or []
        return found

    found, shown, told_so = asked_for(told), asked_for(told[:1]), asked_for(words)
    plain, in_words, *_ = (
        [one for one in found.requests if ("words" in found.requests[one]) is words]
        for words in (False, True)
    )
    assert in_words == list(told_so.requests)
    assert not set(plain) & set(in_words)
    assert len(shown.requests) == 2, "a model that does not see refuses what was just asked"


def test_a_receipt_of_a_release_before_models_had_options_of_their_own_is_taken() -> None:
    """The hash of a request that does not name all its options is of before; what names all has one hash."""
    named = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for body, of_before in (({}, True), ({"temperature": 0}, True), (named, False)):
        value = {"model": "demo", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9, **body}
        (found,) = read_answer(RECEIPTS[NAME], "/v1/chat/completions", value).asked or []
        before = ask_chat(value, "").request.envelope.clear
        before.sampling.ClearField("unnamed")
        assert (len(found.requests) == 2) is of_before
        assert request_digest(before, 9) in found.requests


def test_a_response_repeats_the_models_own_options_by_the_gateways_word() -> None:
    """As its request does not name them, nobody has signed them; what it names is compared."""
    case = CASES["response"]
    value = answer(case) | {"temperature": 0.7, "top_p": 0.8}
    assert {"temperature", "top_p"} <= set(read(case, value).unsigned)
    named = {"model": "demo", **case.body, "temperature": 0.7}
    assert "temperature" not in read_answer(value, case.api, named).unsigned
    for wrong in (value | {"temperature": 1.0}, value | {"top_p": "all"}, value | {"presence_penalty": 0.5}):
        with refused("RECEIPT_MALFORMED", ReceiptError):
            read_answer(wrong, case.api, named)
