"""The heads: what each task adds to a backbone of `modeling_scratch`, and its loss.

Shapes: B batch, T length, S source length, D width, V vocabulary, L labels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.auto import modeling_auto
from transformers.utils import can_return_tuple
from transformers.utils.generic import TransformersKwargs

from .configuration_scratch import ScratchConfig, ScratchDecoderConfig, ScratchEncoderConfig, ScratchSeq2SeqConfig
from .kernels_scratch import is_plain, is_watched, linear_cross_entropy, project
from .layers_scratch import FEED_FORWARDS
from .modeling_scratch import (
    ScratchDecoderModel,
    ScratchEncoderModel,
    ScratchPreTrainedModel,
    ScratchSeq2SeqModel,
    ScratchStack,
    first_token,
    is_padding_mask,
    is_sparse,
    make_norm,
)


class ScratchLanguageModel(ScratchPreTrainedModel):
    """A backbone and a linear map to the vocabulary (section 3.4 of the paper); no softmax inside."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.word_embeddings.weight"}

    def __init__(
        self, config: ScratchConfig, backbone: ScratchPreTrainedModel, vocab_size: int, has_transform: bool = False
    ):
        super().__init__(config)
        self.model = backbone
        self.lm_transform = ScratchTransform(config) if has_transform else nn.Identity()
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def logits(self, hidden_states: Tensor) -> Tensor:  # (..., D) -> (..., V)
        return project(self.lm_head, self.lm_transform(hidden_states))

    def logits_and_loss(
        self,
        hidden_states: Tensor,  # (B, T, D)
        targets: Tensor | None,  # (B, T), aligned with `hidden_states`; -100 where there is nothing to predict
        num_items_in_batch: Tensor | int | None,
        loss_only: bool,
        label_smoothing: float,
        logits_to_keep: int | Tensor = 0,
    ) -> tuple[Tensor | None, Tensor | None]:
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = hidden_states[:, kept]
        if targets is None:
            return self.logits(hidden_states), None
        targets = targets[:, kept]
        if num_items_in_batch is None:
            num_items_in_batch = (targets != -100).sum().clamp(min=1)  # a batch without a target has loss 0, not NaN
        if loss_only:
            return None, self.total_loss(hidden_states, targets, label_smoothing) / num_items_in_batch
        logits = self.logits(hidden_states)
        if label_smoothing:
            return logits, token_loss(logits, targets, num_items_in_batch, label_smoothing)
        loss = self.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets,  # aligned already, also for the loss functions that would shift
            vocab_size=logits.shape[-1],
            num_items_in_batch=num_items_in_batch,
        )
        return logits, loss

    def total_loss(self, hidden_states: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """(B, T, D), (B, T) -> the sum of all losses, without keeping logits. Padding and unmasked tokens have no loss:
        they never reach the widest matrix of the model."""
        head, hidden_states, targets = self.lm_head, hidden_states.flatten(0, 1), targets.flatten()
        is_adapted = not is_plain(head)
        is_transformed = not isinstance(self.lm_transform, nn.Identity)
        # A graph has no room for as many rows as there happen to be targets.
        if is_adapted or (is_transformed and not torch.compiler.is_compiling()):
            real = targets != -100
            hidden_states, targets = hidden_states[real], targets[real]
        hidden_states = self.lm_transform(hidden_states)
        if is_adapted:
            return token_loss(head(hidden_states), targets, 1, label_smoothing)
        return linear_cross_entropy(hidden_states, head.weight, head.bias, targets, label_smoothing)


class ScratchTransform(nn.Module):
    """BERT's last step before the vocabulary: a dense layer, the activation of the feed-forward layers, a norm."""

    def __init__(self, config: ScratchConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = FEED_FORWARDS[config.hidden_act][1]
        self.norm = make_norm(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_states)))


def token_loss(
    logits: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy in nats, summed over real targets and divided by `num_items_in_batch`, or by their number."""
    loss = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    return loss / ((targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def read_for(targets: Tensor | None) -> Tensor | None:  # (B, T)
    """What a causal model has to read for the loss of these targets, as a mask of padding: each row up to its last
    target. `None` stands for nearly everything."""
    if targets is None or is_watched():
        return None
    real = (targets != -100).flip(1).cumsum(1).flip(1) > 0
    return real.long() if is_sparse(real) else None


class ScratchEncoderForMaskedLM(ScratchLanguageModel):
    """The encoder with a head that guesses masked tokens (BERT, section 3.1)."""

    config: ScratchEncoderConfig
    _auto_class = "AutoModelForMaskedLM"

    def __init__(self, config: ScratchEncoderConfig):
        backbone = ScratchEncoderModel(config, is_pooled=False)
        super().__init__(config, backbone, config.vocab_size, config.lm_head_transform)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        loss_only: bool = False,
        label_smoothing: float = 0.0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """
        Args:
            labels: the tokens behind the masks (B, T), -100 elsewhere.
            num_items_in_batch: number of targets to divide the summed loss by, so that accumulated gradients equal
                those of one large batch.
            loss_only: compute the head on the targets alone and the layers without padding, and return no logits. Same
                loss, much less time and memory.
            label_smoothing: share of the probability spread over the vocabulary (section 5.4 of the paper).

        Returns:
            `loss` in nats per target, `logits` (B, T, V).
        """
        check_token_labels(labels, input_ids, inputs_embeds)
        kwargs.setdefault("skip_padding", loss_only)
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state, labels, num_items_in_batch, loss_only, label_smoothing
        )
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ScratchDecoderForCausalLM(ScratchLanguageModel, GenerationMixin):
    """The decoder with a head that guesses the next token."""

    config: ScratchDecoderConfig
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: ScratchDecoderConfig):
        super().__init__(config, ScratchDecoderModel(config), config.vocab_size)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.value_head_dim != self.config.head_dim:
            raise ValueError(
                f"value_head_dim={self.config.value_head_dim} differs from head_dim={self.config.head_dim}: the cache "
                "of continuous batching holds keys and values of one width; use generate"
            )
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        loss_only: bool = False,
        label_smoothing: float = 0.0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: the tokens themselves (B, T), -100 where there is nothing to predict; shifted by one here.
            shift_labels: the same, shifted by the caller, in the stead of `labels`.
            logits_to_keep: logits for that many last positions, or for these positions, only; 0 for all.
            num_items_in_batch, loss_only, label_smoothing: as `ScratchEncoderForMaskedLM.forward`.

        Returns:
            `loss` in nats per target, `logits` (B, T, V), `past_key_values`.
        """
        for targets in (labels, shift_labels):
            check_token_labels(targets, input_ids, inputs_embeds)
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        if shift_labels is not None and use_cache is None and past_key_values is None:
            use_cache = False  # nothing is written after a known text
        kwargs.setdefault("skip_padding", loss_only)
        if loss_only and attention_mask is None and position_ids is None and past_key_values is None:
            attention_mask = read_for(shift_labels)
        outputs = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache, **kwargs
        )
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state, shift_labels, num_items_in_batch, loss_only, label_smoothing, logits_to_keep
        )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchSeq2SeqForConditionalGeneration(ScratchLanguageModel, GenerationMixin):
    """The translator: encoder, decoder, and a head over the target vocabulary."""

    config: ScratchSeq2SeqConfig
    _auto_class = "AutoModelForSeq2SeqLM"

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

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        # transformers resizes the head along with the source table, which is right only where both sides share it.
        if not self.config.share_encoder_decoder_embeddings:
            return self.model._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        return super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Module:
        """Resize the target vocabulary, and the head with it, where source and target have one each.

        Raises:
            ValueError: if both sides share one table; `resize_token_embeddings` is for that.
        """
        if self.config.share_encoder_decoder_embeddings:
            raise ValueError("share_encoder_decoder_embeddings=True: use resize_token_embeddings")
        table = self.model.decoder._resize_token_embeddings(new_num_tokens)
        self.lm_head = self._get_resized_lm_head(self.lm_head, new_num_tokens)
        self.config.decoder_vocab_size = new_num_tokens
        self.tie_weights()
        return table

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Called by beam search: beams of a sentence trade what they have written. The source that they all read is the
        same for each of them, and stays where it is."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Teacher forcing: the target one step later, after `decoder_start_token_id`; (B, T) -> (B, T)."""
        shifted = labels.roll(1, dims=-1)
        shifted[:, 0] = self.config.decoder_start_token_id
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
        num_items_in_batch: Tensor | int | None = None,
        loss_only: bool = False,
        label_smoothing: float = 0.0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """
        Args:
            labels: the target (B, T), without its start token, -100 on padding; `decoder_input_ids` follow from it.
            num_items_in_batch, loss_only, label_smoothing: as `ScratchEncoderForMaskedLM.forward`.

        The other arguments are those of `ScratchSeq2SeqModel.forward`.

        Returns:
            `loss` in nats per target token, `logits` (B, T, V), `past_key_values`, and the encoder's outputs.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            use_cache = False if use_cache is None else use_cache
        check_token_labels(labels, decoder_input_ids, decoder_inputs_embeds)
        kwargs.setdefault("skip_padding", loss_only)
        if loss_only and decoder_attention_mask is None and past_key_values is None:
            decoder_attention_mask = read_for(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = self.logits_and_loss(
            outputs.last_hidden_state, labels, num_items_in_batch, loss_only, label_smoothing
        )
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, **{k: v for k, v in outputs.items() if k != "last_hidden_state"}
        )


class ScratchClassifier(ScratchPreTrainedModel):
    """A backbone of either kind, dropout, and a linear map from each vector that `select` keeps."""

    backbone: Callable[[ScratchConfig], ScratchStack]
    output_type: type[ModelOutput]
    num_outputs: int | None = None  # default: one for each label
    # Heads that differ in what they score differ in name too, so that none takes the weights of another for its own.
    head_name = "classifier"

    def __init__(self, config: ScratchConfig):
        super().__init__(config)
        self.model = self.backbone(config)
        self.dropout = nn.Dropout(config.dropout if config.classifier_dropout is None else config.classifier_dropout)
        outputs = self.num_outputs or config.num_labels
        setattr(self, self.head_name, nn.Linear(config.hidden_size, outputs, bias=config.classifier_bias))
        self.post_init()

    def head(self, vectors: Tensor) -> Tensor:  # (..., D) -> (..., L)
        return getattr(self, self.head_name)(self.dropout(vectors))

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        """The shape of labels, given tokens (B, T) or embeddings (B, T, D)."""
        raise NotImplementedError

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        """The vectors to classify, of the backbone's output."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        return token_loss(logits, labels, num_items_in_batch)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ModelOutput:
        """
        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as the backbone's.
            labels: (B,) classes, or numbers for a regression, (B, L) for several at once, for whole sequences; (B, T)
                for tokens, -100 where there is none; (B,) indices of the right choice among several texts.
            num_items_in_batch: as `ScratchEncoderForMaskedLM.forward`.

        Returns:
            `loss`; `logits` (B, L), (B, T, L) or (B, choices).
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and inputs is not None:
            check_labels(labels, self.label_shape(inputs, labels))
        outputs = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, kwargs)
        logits = self.head(self.select(outputs, attention_mask, input_ids))
        loss = self.loss(logits, labels, num_items_in_batch) if labels is not None else None
        return self.output_type(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutput:
        kwargs.setdefault("use_cache", False)  # there is no next token to keep a cache for
        return self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)


class ScratchForSequenceClassification(ScratchClassifier):
    """One label, several, or one number, for a whole sequence."""

    _auto_class = "AutoModelForSequenceClassification"
    output_type = SequenceClassifierOutput

    def settle_problem_type(self, labels: Tensor) -> None:
        """Write down in the configuration what the labels show to be asked for, as transformers' own models do."""
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.is_floating_point():
                self.config.problem_type = "multi_label_classification"
            else:
                self.config.problem_type = "single_label_classification"

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        self.settle_problem_type(labels)
        single = self.config.problem_type == "single_label_classification" or self.config.num_labels == 1
        return inputs.shape[:1] if single else (len(inputs), self.config.num_labels)

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Mean squared error, cross-entropy, or binary cross-entropy, as `config.problem_type` says or the labels show.

        Summed and divided by `num_items_in_batch` numbers, or by how many there are. The loss of transformers heeds
        that argument for single labels only, and so multiplies gradients by the number of accumulation steps.
        """
        if self.config.problem_type == "single_label_classification":
            return token_loss(logits, labels, num_items_in_batch)
        regression = self.config.problem_type == "regression"
        error = F.mse_loss if regression else F.binary_cross_entropy_with_logits
        total = error(logits.float(), labels.reshape(logits.shape).float(), reduction="sum")
        return total / (logits.numel() if num_items_in_batch is None else num_items_in_batch)


class ScratchForTokenClassification(ScratchClassifier):
    """A label for each token."""

    _auto_class = "AutoModelForTokenClassification"
    output_type = TokenClassifierOutput

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        return inputs.shape[:2]

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        return outputs.last_hidden_state  # (B, T, D)


class ScratchForQuestionAnswering(ScratchClassifier):
    """Where the answer starts and ends in the text."""

    _auto_class = "AutoModelForQuestionAnswering"
    num_outputs, head_name = 2, "qa_outputs"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: first and last token of the answer (B,); beyond the text where it was cut
                off, which the loss then leaves out.
            num_items_in_batch: as `ScratchEncoderForMaskedLM.forward`.

        Returns:
            `loss`, the mean of both ends; `start_logits` and `end_logits` (B, T).
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        for positions in (start_positions, end_positions):
            if positions is not None and inputs is not None:
                check_labels(positions, inputs.shape[:1])
        outputs = self.encode(input_ids, attention_mask, position_ids, inputs_embeds, kwargs)
        start_logits, end_logits = self.head(outputs.last_hidden_state).movedim(-1, 0).contiguous()
        loss = None
        if start_positions is not None and end_positions is not None:
            losses = []
            for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
                beyond = (positions < 0) | (positions >= logits.shape[1])
                losses.append(token_loss(logits, positions.masked_fill(beyond, -100), num_items_in_batch))
            loss = sum(losses) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchEncoderForSequenceClassification(ScratchForSequenceClassification):
    """Reads the label off the first token, [CLS]."""

    config: ScratchEncoderConfig
    backbone = ScratchEncoderModel

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        return summary(outputs, attention_mask)  # (B, D)


class ScratchDecoderForSequenceClassification(ScratchForSequenceClassification):
    """Reads the label off the last real token, the only one that has seen all the others."""

    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        hidden_states = outputs.last_hidden_state
        batch, length = hidden_states.shape[:2]
        if is_padding_mask(attention_mask):
            real = attention_mask[:, -length:].bool()  # without the prefix that a cache may hold
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            return hidden_states[:, -1]
        last = (torch.arange(length, device=real.device) * real).argmax(-1)
        return hidden_states[torch.arange(batch, device=real.device), last]  # (B, D)


class ScratchEncoderForTokenClassification(ScratchForTokenClassification):
    config: ScratchEncoderConfig
    backbone = partial(ScratchEncoderModel, is_pooled=False)


class ScratchDecoderForTokenClassification(ScratchForTokenClassification):
    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel


class ScratchEncoderForQuestionAnswering(ScratchForQuestionAnswering):
    config: ScratchEncoderConfig
    backbone = partial(ScratchEncoderModel, is_pooled=False)


class ScratchDecoderForQuestionAnswering(ScratchForQuestionAnswering):
    config: ScratchDecoderConfig
    backbone = ScratchDecoderModel


class ScratchEncoderForMultipleChoice(ScratchClassifier):
    """Which of several texts is the right one: each is scored by its first token. Every input has one more dimension,
    (B, choices, ...)."""

    config: ScratchEncoderConfig
    backbone = ScratchEncoderModel
    output_type = MultipleChoiceModelOutput
    num_outputs, head_name = 1, "choice_scorer"
    _auto_class = "AutoModelForMultipleChoice"

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        return inputs.shape[:1]

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        kwargs: dict[str, Any],
    ) -> BaseModelOutput:
        inputs = (input_ids, attention_mask, position_ids, kwargs.get("token_type_ids"), inputs_embeds)
        shapes = [None if x is None else tuple(x.shape) for x in inputs]
        if any(shape is not None and len(shape) < 3 for shape in shapes):
            raise ValueError(f"inputs must have shape (batch, choices, length), got {shapes[0] or shapes[-1]}")
        ids, mask, positions, types, embeds = (None if x is None else x.flatten(0, 1) for x in inputs)
        outputs = super().encode(ids, mask, positions, embeds, kwargs | {"token_type_ids": types})
        choices = next(shape[1] for shape in (shapes[0], shapes[-1]) if shape is not None)
        for name in ("last_hidden_state", "pooler_output"):
            if outputs.get(name) is not None:
                outputs[name] = outputs[name].unflatten(0, (-1, choices))  # (B, choices, ...)
        return outputs

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        return summary(outputs, attention_mask)  # (B, choices, D)

    def head(self, vectors: Tensor) -> Tensor:  # (B, choices, D) -> (B, choices)
        return super().head(vectors).squeeze(-1)


def summary(outputs: ModelOutput, attention_mask: Any) -> Tensor:
    """The vector for a whole text: the pooler's if there is one, or the state of the first token."""
    pooler_output = outputs.get("pooler_output")
    return first_token(outputs.last_hidden_state, attention_mask) if pooler_output is None else pooler_output


def check_labels(labels: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(labels.shape) not in (tuple(shape), (*shape, 1)):
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit the input: they must be {tuple(shape)}")


def check_token_labels(labels: Tensor | None, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if labels is not None and inputs is not None:
        check_labels(labels, inputs.shape[:2])


# The Trainer (which labels it smooths, and whether shifted) and the pipelines look models up by class name in these
# tables; `AutoModel.register` does not write them.
for _config in (ScratchEncoderConfig, ScratchDecoderConfig, ScratchSeq2SeqConfig):
    for _auto_class, _reference in _config._auto_map.items():
        if _auto_class != "AutoConfig":
            _names = getattr(modeling_auto, _auto_class)._model_mapping._model_mapping
            _names[_config.model_type] = _reference.split(".")[1]
