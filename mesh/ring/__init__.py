"""State that members and gateways of a ring derive alike: rows in lanes, prefixes, routing by prefix."""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    composition=(
        "Admission Adopting Change Chunk Composition Dropping Eviction Keeping MAX_CHANGES "
        "MAX_CHOICES MAX_DRAFTED MAX_DRAFTS MAX_LANES MAX_UNSETTLED Marking "
        "ResolvedStep Restoring Settling Unmarking"
    ),
    kept_prefixes="MAX_PREFIXES Origin",
    limits=(
        "DRAFT_MARKS DRAFT_ROWS HEAD_ROWS MAX_ALIASES MAX_CONTEXT MAX_KEEP_ALIVE MAX_LAYERS "
        "MAX_PREFILL_CHUNK MAX_REPLICAS MAX_ROWS MAX_RUNS MAX_SPANS MAX_STAGES MAX_TAPS"
    ),
    prefix_ends="Ends",
    prefix_marks="thinned",
    prefix_names=(
        "Chain KEY_BYTES MAX_CHAIN_BYTES NAME_BYTES NO_CHAIN Names OPENING PrefixNames "
        "STORED_BLOCK chain_of clear_scope edges ends is_clear names_key sealed_scope split"
    ),
    routing="choose leeway ranked routing_key",
    spread="Times between round_seconds rounds_with_another spreads",
    unbroken="MAX_UNBROKEN around",
    wishes="Wishes",
)
