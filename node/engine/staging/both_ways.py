"""Masks of models in which the tokens of an image attend to each other in both directions (Gemma 4).

An image's tokens are in one chunk, so the chunk's own columns are all that changes: the last ones of a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:  # loading models takes no numpy
    import numpy as np
    import numpy.typing as npt


class BothWays:
    """The masks of one call of a stage."""

    def __init__(self, images: npt.NDArray[np.int32], held: int) -> None:
        """`images`, [tokens]: the image of each token of the call, -1 for text. `held`: the tokens in the
        caches before it."""
        self._images, self._held = images, held
        self._made: dict[Any, tuple[Any, mx.array]] = {}

    def mask(self, own: Any) -> mx.array:
        """A mask of the model's own for layers, with the images: "causal", or bool [..., tokens, keys] with
        the call's tokens as the last keys."""
        key = own if isinstance(own, str) else id(own)
        if key not in self._made:
            self._made[key] = own, self._over(own)
        return self._made[key][1]

    def _over(self, own: Any) -> mx.array:
        from mlx_lm.models.base import create_causal_mask

        tokens = len(self._images)
        mask: mx.array = create_causal_mask(tokens, self._held) if isinstance(own, str) else own
        one, other = self._images[:, None], self._images[None]
        same = mx.array((one == other) & (one >= 0))
        before = mask.shape[-1] - tokens
        return mx.concatenate([mask[..., :before], mask[..., before:] | same], axis=-1)
