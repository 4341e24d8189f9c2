"""The head's text side: prompts to tokens, tokens to text."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    alike="check_alike",
    answers="Answer",
    book="StoredNames",
    chat="budget_of encode_chat",
    constraints="grammar_of",
    detokenizer="StopStrings",
    families="THINK family_of thinking_of",
    front="Front",
    marked="CALLS DETAILS LAST MESSAGES THOUGHTS TOOLS in_short kinds_of refuse_lost shape_of with_images",
    picture="Arrays Picture grids_of with_digests",
    piecewise="as_json",
    plaintext="too_long",
    reading="STUCK_SECONDS",
    rendering="RenderingProcess refused",
    sections="Delimiters Sections format_of",
    shapes="Shape in_turns",
    template="ChatTemplate",
    tokenizer="FileTokenizer LoadedTokenizer Tokenizer byte_level_table load_tokenizer",
)
