"""Reasoning, text and tool calls told apart, however the text comes in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine.text import Delimiters, Sections, StopStrings, format_of
from sealring.node.engine.text.detokenizer import BytesDetokenizer
from sealring.node.engine.text.notations.notation import NOTATIONS
from sealring.node.engine.text.sections import SpeltDetokenizer
from sealring.v1 import inference_pb2 as inference

STOP, LENGTH, MORE = (
    inference.FINISH_REASON_STOP,
    inference.FINISH_REASON_LENGTH,
    inference.FINISH_REASON_UNSPECIFIED,
)
QWEN = format_of("<tool_call> tool_call.name", ("<think>", "</think>"))
MISTRAL = format_of("[TOOL_CALLS]", ())
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


def chat(**fields: Any) -> inference.Chat:
    return inference.Chat(tools=[inference.Tool(name="look")], **fields)


def read(
    sections: Sections, pieces: list[str], finish: inference.FinishReason.ValueType = STOP
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, reasoning and calls of an answer that comes in these pieces."""
    text, parsed = "", inference.Parsed()
    for number, piece in enumerate(pieces, 1):
        part, beside = sections.take(piece, finish if number == len(pieces) else MORE)
        text += part
        if beside is not None:
            parsed.reasoning += beside.reasoning
            parsed.tool_calls.extend(beside.tool_calls)
    return text, parsed.reasoning, [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@given(st.data())
def test_an_answer_is_divided_alike_however_it_is_cut(data: st.DataObject) -> None:
    whole = f"<think>\nhm <b>\n</think>\n\nI look.{CALL}\n{CALL} < done"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1))))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    call = ("look", {"at": "x"})
    assert read(Sections(QWEN, (), chat()), pieces) == ("I look. < done", "hm <b>\n", [call, call])


TEXTS = ("\n\nIt is Berlin, not Paris.\n", " Then aab.\n", "Done: Paris")
WHOLE = f"<think>\nParis? So. aab\n</think>{TEXTS[0]}{CALL}{TEXTS[1]}<think>Done</think>{TEXTS[2]}"


@given(st.data())
def test_a_stop_string_is_one_of_the_text_alone(data: st.DataObject) -> None:
    """Thoughts and calls hold some of the strings, too. The answer ends at the first one that a piece of the
    text completes, however it is cut. Nothing comes behind it."""
    texts = [TEXTS[0].lstrip("\n"), *TEXTS[1:]]
    found = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text) - 1), st.integers(1, 9)).map(
            lambda at: text[at[0] : at[0] + at[1]]
        )
    )
    drawn = data.draw(st.lists(found | st.sampled_from(["look", "<tool", "</think>", "So."]), max_size=3))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(WHOLE) - 1))))
    pieces = [WHOLE[start:end] for start, end in zip([0, *cuts], [*cuts, len(WHOLE)], strict=True)]
    stops = StopStrings(drawn)
    text, reasoning, calls = read(Sections(QWEN, (), chat(), "", stops), pieces)
    expected, ended = "", None
    for number, each in enumerate(texts):
        ends = [(each.find(stop) + len(stop), -len(stop)) for stop in drawn if stop in each]
        if ends:
            end, length = min(ends)
            expected, ended = expected + each[: end + length], number
            break
        expected += each
    assert (text, stops.stopped) == (expected, ended is not None)
    assert len(calls) == (ended != 0)
    assert reasoning == "Paris? So. aab\n" + "Done" * (ended in (None, 2))


def test_a_call_that_is_text_may_have_a_stop_string() -> None:
    stops = StopStrings(["ken"])
    assert (
        read(Sections(QWEN, (), chat(), "", stops), ["<tool_call>broken</tool_call>!"])[0] == "<tool_call>bro"
    )


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    for end, expected in (("<think>\n", ("b", "a", [])), ("<think>\n\n</think>\n\n", ("ab", "", []))):
        pieces = ["a</think>", "b"] if expected[1] else ["a", "b"]
        assert read(Sections(QWEN, (), chat(), end), pieces) == expected


@pytest.mark.parametrize("broken", ["{", '{"name": 1}', '{"name": "lo ok", "arguments": {}}', "[]x"])
def test_a_call_that_cannot_be_read_is_text(broken: str) -> None:
    told = read(Sections(QWEN, (), chat()), [f"<tool_call>{broken}</tool_call>!"])
    assert told == (f"<tool_call>{broken}</tool_call>!", "", [])


def test_a_call_that_is_cut_off_is_text_and_one_without_its_end_is_a_call() -> None:
    cut = CALL.removesuffix("</tool_call>")
    assert read(Sections(QWEN, (), chat()), [cut], LENGTH) == (cut, "", [])
    assert read(Sections(QWEN, (), chat()), [cut])[2] == [("look", {"at": "x"})]


def test_without_tools_nothing_is_a_call() -> None:
    assert read(Sections(QWEN, (), inference.Chat()), [CALL]) == (CALL, "", [])


def test_the_answer_ends_with_its_one_call() -> None:
    sections = Sections(QWEN, (), chat(one_call=True))
    text, parsed = sections.take(CALL + CALL, MORE)
    assert sections.over
    assert (text, len(parsed.tool_calls) if parsed else 0) == ("", 1)


def test_a_required_call_has_begun() -> None:
    sections = Sections(QWEN, (), chat(call_required=True))
    assert read(sections, [CALL.removeprefix("<tool_call>")])[2] == [("look", {"at": "x"})]


def test_a_marker_that_is_a_special_token_is_no_text_and_no_text_is_one() -> None:
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "[SEP]"}
    detokenizer = SpeltDetokenizer(
        BytesDetokenizer(lambda token: bytes([token]) if token > 3 else b"", strip_space=False), special
    )

    def spell(*tokens: int | str) -> list[str]:
        ids = [token for one in tokens for token in ([one] if isinstance(one, int) else one.encode())]
        return [detokenizer.add(token) for token in ids]

    names = frozenset(special.values())
    said = spell("hi", 3, "[TOOL_CALLS]", 1, "look", 2, '{"at": 1}')
    assert read(Sections(MISTRAL, names, chat()), said) == ("hi[TOOL_CALLS]", "", [("look", {"at": 1})])


@pytest.mark.parametrize(
    ("source", "vocabulary", "expected"),
    [
        ("", (), Delimiters()),
        ("", ("<think>",), Delimiters()),
        ("", ("<|channel>", "<channel|>"), Delimiters(("<|channel>thought", "<channel|>"))),
    ],
)
def test_a_model_without_marks_has_no_format(
    source: str, vocabulary: tuple[str, ...], expected: Delimiters
) -> None:
    assert format_of(source, vocabulary) == expected
    assert bool(expected) is ("<channel|>" in vocabulary)


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
HARMONY = format_of("", HARMONY_TOKENS)
NAMES = (*HARMONY_TOKENS, "<|end|>", "<|constrain|>")
THOUGHT = "<|channel|>analysis<|message|>hm <b>"
CALLED = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}'


def marked(text: str) -> str:
    """Special tokens as SpeltDetokenizer names them."""
    for name in NAMES:
        text = text.replace(name, f"\ufdd0{name}\ufdd1")
    return text


@given(st.data())
def test_messages_of_gpt_oss_are_told_by_their_headers(data: st.DataObject) -> None:
    text = "<|channel|>final<|message|>It is <|x|>."
    before = "<|channel|>commentary<|message|>I look."
    start = "<|end|><|start|>assistant"
    for whole, expected in (
        (THOUGHT + start + text, ("It is <|x|>.", "hm <b>", [])),
        (THOUGHT + start + CALLED, ("", "hm <b>", [("look", {"at": "x"})])),
        (before + start + CALLED, ("I look.", "", [("look", {"at": "x"})])),
        (" to=functions.look<|channel|>commentary json<|message|>{}", ("", "", [("look", {})])),
        (text, ("It is <|x|>.", "", [])),
        ("<|channel|>final", ("", "", [])),
        (f"{THOUGHT}<|end|>So it is.", ("So it is.", "hm <b>", [])),
        (f"{THOUGHT}{start}", ("", "hm <b>", [])),
        (f"{THOUGHT}{start} is what I am.{start}{text}", (" is what I am.It is <|x|>.", "hm <b>", [])),
        ("<|channel|>final It is.", (" It is.", "", [])),
        ("<|channel|>analysis I see.<|end|>Yes<|message|>!", ("Yes!", " I see.", [])),
        ("<|channel|>anagram", ("anagram", "", [])),
        (" to=Paris", (" to=Paris", "", [])),
        ("<|channel|>final json is it", (" json is it", "", [])),
    ):
        said = marked(whole)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(said) - 1))))
        pieces = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        assert read(Sections(HARMONY, NAMES, chat()), pieces) == expected


def test_gpt_oss_goes_on_with_a_call_that_is_required() -> None:
    assert HARMONY.call is not None
    rest = marked(CALLED.removeprefix(HARMONY.call[0]))
    required = Sections(HARMONY, NAMES, chat(call_required=True))
    assert read(required, [rest]) == ("", "", [("look", {"at": "x"})])
    assert read(Sections(HARMONY, NAMES, chat()), [marked(CALLED) + "}"]) == ('{"at": "x"}}', "", [])
    assert read(Sections(HARMONY, NAMES, inference.Chat()), [marked(CALLED)]) == ('{"at": "x"}', "", [])


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("source", "vocabulary", "calls"),
    [
        (
            BEGIN + "```json",
            (),
            [
                f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{arguments}\n```<｜tool▁call▁end｜>{END}"
                for arguments in ('{"at": "x"}', "{}")
            ],
        ),
        (
            BEGIN,
            (),
            [
                f"{BEGIN}<｜tool▁call▁begin｜>look<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>{END}"
                for arguments in ('{"at": "x"}', "{}")
            ],
        ),
        (
            "",
            ("｜DSML｜",),
            [
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
                f"{parameter}</｜DSML｜invoke>\n</｜DSML｜function_calls>"
                for parameter in (
                    '<｜DSML｜parameter name="at" string="true">x</｜DSML｜parameter>\n',
                    "",
                )
            ],
        ),
    ],
)
def test_deepseek_calls(source: str, vocabulary: tuple[str, ...], calls: list[str]) -> None:
    form = format_of(source, vocabulary)
    told = read(Sections(form, (), chat()), ["I look.", *calls])
    assert told == ("I look.", "", [("look", {"at": "x"}), ("look", {})])
    assert form.call is not None
    broken = f"{form.call[0]}nothing{form.call[1]}"
    assert read(Sections(form, (), chat()), [broken])[2] == []


def cut(data: st.DataObject, whole: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=12)))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


CODER = format_of("<tool_call>\n<function=", ("<think>", "</think>"))
LLAMA = format_of('<|start_header_id|> "parameters": ', ())
FUNCTION = "<function=look>\n<parameter=at>\nx\n</parameter>\n</function>"
CALLS = [("look", {"at": "x"})]


@pytest.mark.parametrize(
    ("form", "whole", "expected"),
    [
        (
            QWEN,
            f"<think>\nI call it.\n{CALL}\nand wait.\n</think>\n\nSo.",
            ("So.", "I call it.\nand wait.\n", CALLS),
        ),
        (
            QWEN,
            "<think>\n<tool_call> here, but no.\n</think>\n\nHi.",
            ("Hi.", "<tool_call> here, but no.\n", []),
        ),
        (QWEN, '<think>\n<tool_call>{"name": "x\n</think>\n\nHi.', ("Hi.", '<tool_call>{"name": "x\n', [])),
        (QWEN, f'<tool_call>{{"name": "{CALL}', ('<tool_call>{"name": "', "", CALLS)),
        (
            QWEN,
            f"<think>\n<tool_call>{{}}</tool_call>\n</think>{CALL}",
            ("", "<tool_call>{}</tool_call>\n", CALLS),
        ),
        (QWEN, f"{CALL[:-12]}{CALL}", ("", "", CALLS * 2)),
        (QWEN, "Use `<think>` like <think> to think.", ("Use `<think>` like <think> to think.", "", [])),
        (QWEN, "So.\n<think>hm</think>\nYes", ("So.\nYes", "hm", [])),
        (QWEN, "hm</think>\n\nYes", ("hm</think>\n\nYes", "", [])),
        (CODER, f"Hm.\n{FUNCTION}\n</tool_call>!", ("Hm.\n!", "", CALLS)),
        (CODER, f"{FUNCTION}{FUNCTION}", ("", "", CALLS * 2)),
        (CODER, "like <function=x> or <function= y>", ("like <function=x> or <function= y>", "", [])),
        (LLAMA, ' {"name": "look", "parameters": {"at": "x"}}', (" ", "", CALLS)),
        (LLAMA, '{"name": "Ann", "age": [3]', ('{"name": "Ann", "age": [3]', "", [])),
        (LLAMA, '{"age": 3} {"name"', ('{"age": 3} {"name"', "", [])),
    ],
)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_what_an_answer_consists_of(form: Delimiters, whole: str, expected: Any, data: st.DataObject) -> None:
    assert read(Sections(form, (), chat()), cut(data, whole)) == expected


FORMS = {
    name: Delimiters(("<think>", "</think>"), (one.begin, one.end), name) for name, one in NOTATIONS.items()
}
del FORMS["harmony"]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_byte_is_lost_and_no_cut_changes_an_answer(data: st.DataObject) -> None:
    """It is made of marks of its notation, of thoughts, and of words."""
    name = data.draw(st.sampled_from(sorted(FORMS)))
    notation = NOTATIONS[name]
    marks = [
        part for one in vars(notation).values() if isinstance(one, str) for part in one.split("%s") if part
    ]
    words = ["x", " ", "\n", '"', "{", "}", "\\", ":", "look", "<think>", "</think>", *marks]
    whole = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    once = read(Sections(FORMS[name], (), chat()), [whole])
    assert read(Sections(FORMS[name], (), chat()), cut(data, whole)) == once
    if "think" not in whole and not once[2]:
        assert once[0] == whole


def test_messages_of_muse_glimmer_hold_calls_with_marks() -> None:
    form = format_of("<atem:function_calls>", ())
    call = '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="at">x</atem:parameter>\n'
    said = " to=self<|message|>hm<|eom|><|start|>assistant to=look<|message|>"
    whole = f"{said}{call}</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant<|message|>So."
    assert read(Sections(form, (), chat()), [whole]) == ("So.", "hm", CALLS)


def test_gpt_oss_without_a_header_and_with_its_own_tools() -> None:
    python = inference.Tool(name="python", parameters='{"properties": {"code": {"type": "string"}}}')
    plain = ("Hello <b>", "", [])
    assert read(Sections(HARMONY, NAMES, chat()), ["Hel", "lo <b>"]) == plain
    for header, expected in (
        ("<|channel|>analysis to=python code", ("", "print(1)", [])),
        ("<|channel|>commentary to=browser.open", ("print(1)", "", [])),
    ):
        assert read(Sections(HARMONY, NAMES, chat()), [marked(f"{header}<|message|>print(1)")]) == expected
    own = Sections(HARMONY, NAMES, inference.Chat(tools=[python]))
    said = marked("<|channel|>analysis to=python code<|message|>print(1)")
    assert read(own, [said]) == ("", "", [("python", {"code": "print(1)"})])


@pytest.mark.parametrize("text", ["<html> it", " two", "  it", " to be", "t", " ", "<"])
def test_text_that_begins_as_a_header_might_is_text_however_it_is_cut(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(Sections(HARMONY, NAMES, chat()), pieces) == (text, "", [])
    header = marked(" to=functions.look<|channel|>commentary<|message|>{}")
    for pieces in ([header], [header[:1], header[1:3], header[3:]]):
        assert read(Sections(HARMONY, NAMES, chat()), pieces) == ("", "", [("look", {})])


def test_a_special_token_before_a_thought_leaves_it_at_the_beginning_of_its_line() -> None:
    pieces = [marked("<|end|>"), "  ", "<think>", "hm"]
    for cut in (pieces, ["".join(pieces)]):
        assert read(Sections(QWEN, ("<|end|>",), chat()), cut) == ("  ", "hm", [])


def test_a_call_without_a_word_has_no_arguments() -> None:
    whole = marked(" to=functions.look<|channel|>commentary<|message|>")
    assert read(Sections(HARMONY, NAMES, chat()), [whole]) == ("", "", [("look", {})])


@pytest.mark.parametrize("step", [1, 999])
def test_an_end_behind_a_beginning_without_a_call_is_text(step: int) -> None:
    """A call without its beginning stands before it, behind which a stray end would be left out."""
    hy3 = NOTATIONS["hy3"]
    whole = f"{hy3.call.strip() % 'look'}\n{hy3.begin}{hy3.end}"
    pieces = [whole[at : at + step] for at in range(0, len(whole), step)]
    found = read(Sections(Delimiters(call=(hy3.begin, hy3.end), name="hy3"), (), chat()), pieces)
    assert found == (hy3.begin + hy3.end, "", [("look", {})])


ALONE = '{"name": "look", "arguments": {"at": "a } b \\\\\\" {"}}'
SAID = [("look", {"at": 'a } b \\" {'})]
FENCED = f"```json\n{ALONE}\n```"


@pytest.mark.parametrize("whole", [ALONE, f"\n {ALONE}\n", FENCED, FENCED.replace("json", ""), FENCED[:-4]])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_an_answer_that_is_one_object_with_a_tools_name_is_a_call(whole: str, data: st.DataObject) -> None:
    for before, thought in (("", ""), ("<think>hm</think>", "hm")):
        text, *found = read(Sections(QWEN, (), chat()), cut(data, before + whole))
        assert (text.strip(), *found) == ("", thought, SAID)


OTHERS = [
    f"{ALONE} Done.",
    f"{ALONE}{ALONE}",
    f"{FENCED}\nSo.",
    ALONE + "}",
    ALONE[:-1],
    f"[{ALONE}]",
    f"So: {ALONE}",
]
WORDS = (*'{}"`:, \n', "name", '"name": "look"', '"arguments": {', "look", "```json\n", "x", "[", "]")


@given(
    data=st.data(), other=st.sampled_from(OTHERS) | st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
)
@settings(max_examples=120, deadline=None)
def test_any_other_json_is_text_and_waits_only_while_it_may_be_a_call(
    data: st.DataObject, other: str
) -> None:
    begins = [f'{fence}{{"name":"look","arguments":{{' for fence in ("", "```", "```json")]
    sections, sent, told = Sections(QWEN, (), chat()), "", ""
    for piece in cut(data, other):
        sent, told = sent + sections.take(piece, MORE)[0], told + piece
        compact = "".join(told.split())
        assert sent == told or any(compact.startswith(one) or one.startswith(compact) for one in begins)
    text, parsed = sections.take("", STOP)
    assert parsed is None
    assert sent + text == other


@pytest.mark.parametrize("behind", [" D", "{", "\n```\nx", "]"])
def test_what_follows_an_object_makes_it_text_at_once(behind: str) -> None:
    assert Sections(QWEN, (), chat()).take(FENCED[:-4] + behind, MORE) == (FENCED[:-4] + behind, None)


@pytest.mark.parametrize(
    ("asked", "held"),
    [
        (inference.Chat(), False),
        (chat(), True),
        (chat(begun=True), False),
        (inference.Chat(tools=[inference.Tool(name="look", strict=True)]), False),
        (inference.Chat(tools=[inference.Tool(name="lo")]), False),
    ],
)
def test_json_that_was_asked_for_is_no_call(asked: inference.Chat, held: bool) -> None:
    for form, answer in ((QWEN, ALONE), (QWEN, FENCED), (LLAMA, ALONE)):
        assert read(Sections(form, (), asked, held=held), [answer]) == (answer, "", [])
