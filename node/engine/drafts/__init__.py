"""Sources of drafts: what guesses tokens, each in a file of its own.

| source | file | of a row | computes |
|---|---|---|---|
| the row's text | `text.py`, by `lookup.py` | `TextSource` | nothing |
| a draft model | `model.py`, `model_rows.py` | `Guesses` | between steps of the head (`ModelAtHead`) |
| an MTP head | `mtp.py` | `GuessesAhead` | along with steps of the tail (`MtpDrafter`) |
| a drafter that reads hidden states | `hidden.py` | `GuessesAhead` | as an MTP head (`HiddenDrafter`) |

`source.py` says what the head asks of them, `tail.py` what the tail does, and `runs.py` counts which drafts
were right. To add a source, give it a number (`DraftSource` in `control.proto`), a file, and an entry of
`OF_ROW` in `sources.py`. If it works without weights it belongs to `FREE` too; models are loaded by
`node/engine/guessing.py`.
"""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    drafter_models="DrafterFacts classes_of kind_of",
    guesses="CAUGHT_UP Feed Guesses GuessesAhead",
    hidden="HiddenDrafter",
    lookup="Lookup",
    model="Drafter ModelAtHead",
    mtp="MtpDrafter",
    runs="Runs",
    source="Proposed RowSource RowText",
    sources="OF_ROW Sources of_row",
    tail="TailDrafter",
    tally="Tally",
    text="TextSource",
)
