"""The translator: two stacks, as in figure 1 of "Attention Is All You Need" (Vaswani et al., 2017), and a head.

Shapes: B batch, T length of the target, S length of the source, D width, V target vocabulary.
"""

from typing import Any, Unpack

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_scratch import preallocate
from .configuration_scratch import ScratchSeq2SeqConfig
from .generation_scratch import ScratchGenerationMixin
from .heads_scratch import LossKwargs, ScratchLanguageModel, check_token_labels, take_loss_kwargs
from .layers_scratch import ScratchAttention
from .stack_scratch import ScratchKwargs, ScratchPreTrainedModel, ScratchStack
from .unpadding_scratch import trim_after_last_target


class ScratchSeq2SeqEncoder(ScratchStack):
    """Blocks that see all of the source."""

    config: ScratchSeq2SeqConfig
    depth, kinds = "encoder_layers", "encoder_layer_types"

    def __init__(self, config: ScratchSeq2SeqConfig):
        super().__init__(config, config.vocab_size, is_causal=False)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, S)
        attention_mask: Tensor | None = None,  # (B, S)
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[ScratchKwargs],
    ) -> BaseModelOutput:
        hidden_states = self.encode(input_ids, inputs_embeds, attention_mask, position_ids, **kwargs)
        return BaseModelOutput(last_hidden_state=hidden_states)


class ScratchSeq2SeqDecoder(ScratchStack):
    """Blocks that see one side of the target, and the encoder's output."""

    config: ScratchSeq2SeqConfig
    depth, kinds = "decoder_layers", "decoder_layer_types"
    preallocate = staticmethod(preallocate)
    _can_record_outputs = {
        **ScratchStack._can_record_outputs,
        "cross_attentions": OutputRecorder(ScratchAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: ScratchSeq2SeqConfig):
        super().__init__(config, config.decoder_vocab_size, is_causal=True, has_encoder=True)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, past + T)
        encoder_hidden_states: Tensor | None = None,  # (B, S, D)
        encoder_attention_mask: Tensor | None = None,  # (B, S)
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[ScratchKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())  # all is kept, also before a window
        source = encoder_hidden_states, encoder_attention_mask
        hidden_states = self.encode(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, *source, **kwargs
        )
        return BaseModelOutputWithPastAndCrossAttentions(hidden_states, past_key_values)


class ScratchSeq2SeqModel(ScratchPreTrainedModel):
    """Encoder and decoder, as in figure 1 of the paper. The two lengths differ freely."""

    config: ScratchSeq2SeqConfig
    _tied_weights_keys = {"decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight"}

    def __init__(self, config: ScratchSeq2SeqConfig):
        super().__init__(config)
        self.encoder = ScratchSeq2SeqEncoder(config)
        self.decoder = ScratchSeq2SeqDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # transformers ties nothing once the head is untied; here the two token tables have a field of their own.
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys) if self.config.share_encoder_decoder_embeddings else {}

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.set_input_embeddings(value)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        table = super()._resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = table.num_embeddings  # transformers sets that of `get_text_config()`, maybe a copy
        return table

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[ScratchKwargs],
    ) -> Seq2SeqModelOutput:
        """
        Args:
            input_ids, attention_mask, inputs_embeds: the source, (B, S), (B, S), (B, S, D).
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds: the target so far, of length T.
            encoder_outputs: the encoder's output, if it has run before.
            past_key_values: an `EncoderDecoderCache` of earlier target tokens.
        """
        source = input_ids if inputs_embeds is None else inputs_embeds
        source = source if encoder_outputs is None else encoder_outputs[0]
        target = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if source is not None and target is not None and source.shape[0] != target.shape[0]:
            sizes = f"{len(source)} sources do not fit {len(target)} targets"
            raise ValueError(f"{sizes} (decoder_input_ids or labels)")
        encoded = encoder_outputs
        if encoded is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        elif not isinstance(encoded, BaseModelOutput):
            encoded = BaseModelOutput(*encoded)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class ScratchSeq2SeqForConditionalGeneration(ScratchLanguageModel, ScratchGenerationMixin):
    """The translator: encoder, decoder, and a head over the target vocabulary."""

    config: ScratchSeq2SeqConfig
    _auto_class = "AutoModelForSeq2SeqLM"
    output_type = Seq2SeqLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embeddings.word_embeddings.weight"}

    def __init__(self, config: ScratchSeq2SeqConfig):
        super().__init__(config, ScratchSeq2SeqModel(config), config.decoder_vocab_size)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        if not self.config.tie_word_embeddings:
            return {}
        # Tied to the table that is stored: the encoder's where the decoder borrows it.
        side = "encoder" if self.config.share_encoder_decoder_embeddings else "decoder"
        return {"lm_head.weight": f"model.{side}.embeddings.word_embeddings.weight"}

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        # transformers resizes the head along with the source table, which is right only where both sides share it.
        owner: Any = super() if self.config.share_encoder_decoder_embeddings else self.model
        return owner._resize_token_embeddings(*args, **kwargs)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        """Resize the target vocabulary, and the head with it, where source and target have one each; a `ValueError`
        where they share one, for which there is `resize_token_embeddings`."""
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("share_encoder_decoder_embeddings=True: use resize_token_embeddings")
        table = self.model.decoder._resize_token_embeddings(new_num_tokens)
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens)
        self.config.decoder_vocab_size = new_num_tokens
        self.tie_weights()
        return table

    @staticmethod
    def create_masks_for_generate(config: ScratchSeq2SeqConfig, **kwargs: Any) -> Any:
        """Called by `generate`, for a static cache: the mask of each kind of the decoder's layers."""
        return create_masks_for_generate(config.get_text_config(decoder=True), **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Called by `generate`. Windows are of the target: of the source, every token is kept."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if "sliding_attention" in self.config.decoder_layer_types and isinstance(cache, EncoderDecoderCache):
            config, old = self.config.get_text_config(decoder=True), cache.cross_attention_cache
            config.layer_types, config.sliding_window = ["full_attention"] * self.config.decoder_layers, None
            if isinstance(old, StaticCache):
                length = model_kwargs["encoder_outputs"][0].shape[1]
                cache.cross_attention_cache = StaticCache(config=config, max_cache_len=length)
            elif not old.get_seq_length():
                cache.cross_attention_cache = DynamicCache(config=config, offloading=old.offloading)

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Called by beam search: beams of a sentence trade what they have written. The source that they all read is the
        same for each of them, and stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Teacher forcing: the target one step later, after `decoder_start_token_id` or, wrapped, its last label."""
        labels = labels.long()
        shifted = labels.roll(1, dims=-1)
        shifted[..., 0] = self.config.decoder_start_token_id
        if self.config.wrap_labels:
            is_target = (labels != -100) & (labels != self.config.pad_token_id)
            shifted[..., :1] = labels.gather(-1, (is_target.sum(-1, keepdim=True) - 1).clamp(min=0))
        # Where there is nothing to predict the token does not matter, as long as the table has it.
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id or 0)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[LossKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Args:
            labels: the target (B, T), without its start token, -100 on padding; `decoder_input_ids` follow from it.
                The rest as `ScratchSeq2SeqModel`, `LossKwargs`.

        Returns:
            `loss` in nats per target token, `logits` (B, T, V), `past_key_values`, and the encoder's outputs.
        """
        loss_kwargs = take_loss_kwargs(kwargs)
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            check_token_labels(labels, decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds)
            if past_key_values is None:
                use_cache = bool(use_cache)  # nothing is written after a known text
                if loss_kwargs.get("loss_only") and decoder_attention_mask is None:
                    decoder_attention_mask = trim_after_last_target(labels)
        source = input_ids, attention_mask
        target = decoder_input_ids, decoder_attention_mask, encoder_outputs, past_key_values
        outputs = self.model(*source, *target, inputs_embeds, decoder_inputs_embeds, use_cache, **kwargs)
        return self.predict(outputs, labels, decoder_attention_mask, **loss_kwargs)
