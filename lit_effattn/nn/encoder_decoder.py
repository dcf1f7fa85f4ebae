"""An encoder that reads a source, and a decoder that writes a target from it."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_effattn.nn.transformer import Transformer, TransformerState
from lit_effattn.sequence import SequenceModule, reads_values, sources


class EncoderDecoder(SequenceModule):
    """An encoder and a decoder with cross-attention (Vaswani et al. 2017, section 3.1).

        p(y | x) = Π_t p(y_t | y_1 … y_{t−1}, encoder(x))

    `remember` encodes a source and returns the decoder's state; calls from that state read the target, so training is
    one call and generation is one call for each token. The state of a source is made once. With linear attention or
    Performer its size does not depend on the source's length.

    Args:
        encoder: Reads the source; not causal, unless the source is to be read from left to right. Any sequence module.
        decoder: A causal Transformer with `cross_attention`, whose `d_source` is the encoder's `d_model`.

    Raises:
        ValueError: If the decoder has no cross-attention, or another `d_source`.

    Examples:
        >>> from lit_effattn.attention import LinearAttention, LinearCrossAttention
        >>> encoder = Transformer(32, 4, 2, attention=LinearAttention, causal=False)
        >>> decoder = Transformer(32, 4, 2, attention=LinearAttention, cross_attention=LinearCrossAttention)
        >>> model = EncoderDecoder(encoder, decoder)
        >>> state = model.remember(torch.zeros(1, 1000, 32))
        >>> y, state = model(torch.zeros(1, 10, 32), state)
        >>> y.shape, state.length
        (torch.Size([1, 10, 32]), tensor([10]))
    """

    def __init__(self, encoder: SequenceModule, decoder: Transformer) -> None:
        super().__init__()
        if decoder.blocks[0].cross_attention is None:
            raise ValueError("the decoder has no cross_attention, so it can't read a source; name a kind")
        if decoder.d_source != encoder.d_model:
            raise ValueError(
                f"the decoder has d_source={decoder.d_source}, but the encoder d_model={encoder.d_model}; set "
                f"d_source={encoder.d_model}"
            )
        self.encoder = encoder
        self.decoder = decoder
        self.d_input = decoder.d_input
        self.d_model = decoder.d_model
        self.d_source = encoder.d_input
        """Width of `remember`'s source."""
        self.causal = True

    def remember(
        self, source: Tensor, lengths: Tensor | None = None, *, max_len: int | None = None
    ) -> TransformerState:
        """Encode `source`, and return the decoder's state before the first position of the target.

        Args:
            source: (B, S, d_source).
            lengths: (B,) integers in 0 … S, the number of valid positions of each row. None: all are valid.
            max_len: Maximum number of positions of the target: see `Transformer.remember`.
        """
        encoded, _ = self.encoder(source, None, lengths)
        return self.decoder.remember(encoded, lengths, max_len=max_len)

    def forward(
        self, x: Tensor, state: TransformerState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, TransformerState | None]:
        """Read the target `x` (B, N, d_input), continuing from `state`: see `SequenceModule.forward`.

        Raises:
            ValueError: If `state` is None, or a row has no source. On a GPU, where the check would wait for the device,
                the output of such a row is NaN instead.
        """
        if state is None:
            raise ValueError("EncoderDecoder: state=None has no source; start from the state that `remember` returns")
        given = torch.stack([source.given for source in sources(state)]).all(0)  # (B,)
        checked = reads_values(given)
        if checked and not given.all():
            missing = (~given).nonzero()[:, 0].tolist()
            raise ValueError(f"EncoderDecoder: rows {missing} of the state have no source; `remember` gives them one")
        y, after = self.decoder(x, state, lengths)
        return (y if checked else y.masked_fill(~given[:, None, None], torch.nan)), after

    @torch.no_grad()
    def attention_weights(
        self, source: Tensor, x: Tensor, source_lengths: Tensor | None = None, lengths: Tensor | None = None
    ) -> list[Tensor]:
        """Return the weights of each layer's cross-attention: see `CrossAttention.attention_weights`.

        Args:
            source: (B, S, d_source).
            x: (B, N, d_input), the target.
            source_lengths: (B,), valid positions of `source`; None: all.
            lengths: (B,), valid positions of `x`; None: all.

        Returns:
            (B, H, N, S) for each layer of the decoder.
        """
        encoded, _ = self.encoder(source, None, source_lengths)
        inputs: list[Tensor] = []
        kinds = [block.cross_attention for block in self.decoder.blocks if block.cross_attention is not None]
        hooks = [kind.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for kind in kinds]
        try:
            self.decoder(x, self.decoder.remember(encoded, source_lengths), lengths)
        finally:
            for hook in hooks:
                hook.remove()
        return [k.attention_weights(i, encoded, source_lengths) for k, i in zip(kinds, inputs, strict=True)]

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> TransformerState:
        """Return the decoder's state without a source, which `forward` rejects."""
        return self.decoder.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)

    def reset(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """Reset the decoder's state, and remove the source: see `SequenceModule.reset`."""
        return self.decoder.reset(state, rows)

    def grow(self, state: TransformerState, max_len: int) -> TransformerState:
        """Make room for more positions of the target: see `SequenceModule.grow`."""
        return self.decoder.grow(state, max_len)

    @property
    def bounded_by(self) -> str | None:
        """The option that bounds the decoder's state: see `SequenceModule.bounded_by`."""
        return self.decoder.bounded_by
