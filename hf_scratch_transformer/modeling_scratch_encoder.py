"""The encoder: a contextual embedding for each token (BERT, Devlin et al., 2019; DistilBERT), and its heads.

Shapes: B batch, T length, D width, V vocabulary.
"""

from functools import partial
from typing import Any, Unpack

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput, MultipleChoiceModelOutput
from transformers.utils import ModelOutput, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_scratch import ScratchConfig, ScratchEncoderConfig
from .heads_scratch import (
    LossKwargs,
    ScratchClassifier,
    ScratchForQuestionAnswering,
    ScratchForSequenceClassification,
    ScratchForTokenClassification,
    ScratchLanguageModel,
    check_token_labels,
    take_loss_kwargs,
)
from .layers_scratch import ScratchPooler
from .stack_scratch import ScratchKwargs, ScratchStack


class ScratchEncoderModel(ScratchStack):
    """A stack of blocks that see both sides, and a pooler if the configuration names one."""

    config: ScratchEncoderConfig

    def __init__(self, config: ScratchConfig, is_pooled: bool = True):
        """`is_pooled`: with that pooler; heads that look at single tokens have none."""
        super().__init__(config, config.vocab_size, is_causal=False)
        self.pooler = ScratchPooler(config) if is_pooled and config.pooler_act else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[ScratchKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            input_ids: tokens (B, T), or `inputs_embeds` (B, T, D) in their stead.
            attention_mask: 1 for real tokens, 0 for padding (B, T); or a prepared mask (B, 1, T, T).
            position_ids: (B, T). Where they start again, and no mask is given, a new document starts: packed documents
                do not see each other.

        Returns:
            `last_hidden_state` (B, T, D); with a pooler also `pooler_output` (B, D).
        """
        hidden_states = self.encode(input_ids, inputs_embeds, attention_mask, position_ids, **kwargs)
        pooled = None if self.pooler is None else self.pooler(first_token(hidden_states, attention_mask))
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


def first_token(hidden_states: Tensor, attention_mask: Any) -> Tensor:  # (..., T, D) -> (..., D)
    """The state of the first token of each text, [CLS]: the first real one, also behind padding on the left."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != hidden_states.ndim - 1:
        return hidden_states[..., 0, :]
    real = attention_mask[..., -hidden_states.shape[-2] :]  # without the prefix that a cache may hold
    index = real.long().argmax(-1)[..., None, None]  # (..., 1, 1)
    index = index.expand(*index.shape[:-1], hidden_states.shape[-1])
    return hidden_states.gather(-2, index).squeeze(-2)


def summary(head: ScratchClassifier, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
    """The vector for a whole text: the pooler's if there is one, or the state of the first token."""
    pooled = outputs.get("pooler_output")
    return first_token(outputs.last_hidden_state, attention_mask) if pooled is None else pooled


class ScratchEncoderForMaskedLM(ScratchLanguageModel):
    """The encoder with a head that guesses masked tokens (BERT, section 3.1)."""

    config: ScratchEncoderConfig
    _auto_class = "AutoModelForMaskedLM"
    output_type = MaskedLMOutput

    def __init__(self, config: ScratchEncoderConfig):
        backbone = ScratchEncoderModel(config, is_pooled=False)
        super().__init__(config, backbone, config.vocab_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[LossKwargs],
    ) -> MaskedLMOutput:
        """
        Args:
            labels: the tokens behind the masks (B, T), -100 elsewhere; the rest as `ScratchEncoderModel`, `LossKwargs`.

        Returns:
            `loss` in nats per target, `logits` (B, T, V).
        """
        check_token_labels(labels, input_ids if inputs_embeds is None else inputs_embeds)
        loss_kwargs = take_loss_kwargs(kwargs)
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, **kwargs)
        return self.predict(outputs, labels, attention_mask, **loss_kwargs)


class ScratchEncoderForSequenceClassification(ScratchForSequenceClassification):
    """Reads the label off the first token, [CLS]."""

    config: ScratchEncoderConfig
    backbone = ScratchEncoderModel
    select = summary  # (B, D)


class ScratchEncoderForTokenClassification(ScratchForTokenClassification):
    config: ScratchEncoderConfig
    backbone = partial(ScratchEncoderModel, is_pooled=False)


class ScratchEncoderForQuestionAnswering(ScratchForQuestionAnswering):
    config: ScratchEncoderConfig
    backbone = partial(ScratchEncoderModel, is_pooled=False)


class ScratchEncoderForMultipleChoice(ScratchClassifier):
    """Which of several texts is the right one: each is scored by its first token. Every input has one more dimension,
    (B, choices, ...)."""

    config: ScratchEncoderConfig
    backbone = ScratchEncoderModel
    output_type = MultipleChoiceModelOutput
    num_outputs, head_name = 1, "choice_scorer"
    select = summary  # (B, choices, D)
    _auto_class = "AutoModelForMultipleChoice"

    def run_backbone(self, **inputs: Any) -> ModelOutput:
        names = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
        texts = {name: inputs[name] for name in names if inputs.get(name) is not None}
        shape = next((tuple(each.shape) for each in texts.values()), ())
        if any(each.ndim < 3 for each in texts.values()):
            raise ValueError(f"inputs must have shape (batch, choices, length), got {shape}")
        outputs = super().run_backbone(**inputs | {name: each.flatten(0, 1) for name, each in texts.items()})
        for name in ("last_hidden_state", "pooler_output"):
            if outputs.get(name) is not None:
                outputs[name] = outputs[name].unflatten(0, shape[:2])  # (B, choices, ...)
        return outputs

    def head(self, vectors: Tensor) -> Tensor:  # (B, choices, D) -> (B, choices)
        return super().head(vectors).squeeze(-1)
