"""Steps' outputs as machines of protocol 12 say them."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rowoutput import row_output

from sealring.mesh.rpc import read_from_12, read_singly, rows_ahead_in_12, say_as_12, say_singly
from sealring.v1 import admin_pb2, membership_pb2, model_pb2
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

LOGPROBS = st.lists(st.builds(inference.TokenLogprob, id=st.integers(0, 9), spelling=st.binary()), max_size=2)
CLEAR = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(),
        "logprobs": LOGPROBS,
        "parsed": st.builds(inference.Parsed, reasoning=st.text(), stop=st.text()),
        "token": st.integers(0, 9),
        "held": LOGPROBS,
        "finish": st.integers(0, 2),
        "prefixes": st.binary(),
        "ends": st.binary(),
    },
)
OUTPUTS = st.builds(
    lambda row, tokens, content: row_output(row, tokens=tokens, **content),
    st.integers(1, 9),
    st.integers(1, 9),
    CLEAR | st.builds(lambda sealed: {"sealed": sealed}, st.binary(min_size=1)),
)


@given(st.lists(OUTPUTS, max_size=3), st.booleans())
def test_a_step_that_was_said_in_the_older_form_is_read_as_it_was(
    outputs: list[control.RowOutput], more: bool
) -> None:
    done = control.StepDone(step=7, outputs=outputs, more=more)
    said = engine.EngineEvent.FromString(say_as_12(engine.EngineEvent(done=done).SerializeToString())).done
    for output, older in zip(outputs, said.outputs, strict=True):
        assert not older.HasField("delta")
        assert older.tokens == output.delta.tokens
        assert (older.text, older.sealed) == (output.delta.text, output.delta.sealed)
        assert (older.token, older.finish) == (output.token, output.finish)
    read_from_12(said)
    assert said == done


def test_a_head_of_protocol_12_says_nothing_in_two_forms() -> None:
    done = control.StepDone(outputs=[control.RowOutput(row=1, text="a", tokens=1)])
    done.outputs[0].delta.text = "b"
    read_from_12(done)
    assert done.outputs == [row_output(1, text="a", tokens=1)]


def test_other_events_pass_as_they_are() -> None:
    event = engine.EngineEvent(opened=control.RowOpened(row=1)).SerializeToString()
    assert say_as_12(event) is event


def test_guesses_ahead_are_of_one_row_as_older_members_take_them() -> None:
    attached = control.Attached(
        sources=[
            control.DraftFacts(source=control.DRAFT_SOURCE_MTP_HEAD, rows=8, ahead=True),
            control.DraftFacts(source=control.DRAFT_SOURCE_MODEL, rows=4),
        ]
    )
    rows_ahead_in_12(attached)
    assert [source.rows for source in attached.sources] == [1, 4]


CARD = model_pb2.ModelCard(parameters=9, precision="int4")
BEAT = membership_pb2.Heartbeat(
    memory_total=8, load=0.5, models=[membership_pb2.HeldModel(name="a")], stored_broken=True, low_power=True
)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (admin_pb2.Node(name="a", addresses=["b:1"], heartbeat=BEAT), "heartbeat"),
        (model_pb2.ModelProfile(layers=2, mtp_bytes=7, card=CARD), "card"),
        (membership_pb2.ModelState(deployment="a", card=CARD), "card"),
        (inference.Model(name="a", card=CARD), "card"),
    ],
)
def test_machines_of_both_protocols_read_what_is_said_in_both_forms(message: Message, name: str) -> None:
    said, older = type(message)(), type(message)()
    said.CopyFrom(message)
    say_singly(said, name)
    older.CopyFrom(said)
    older.ClearField(name)
    assert older != message, "a machine of protocol 12 has fields of its own"
    for each in (said, older, message):
        read = type(message)()
        read.CopyFrom(each)
        read_singly(read, name)
        assert read == message
