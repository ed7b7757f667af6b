"""The heads, which are of no family: what each task adds to a backbone, and its loss.

Shapes: B batch, T length, D width, V vocabulary, L labels.
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    ModelOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.auto import modeling_auto
from transformers.utils import can_return_tuple

from .configuration_scratch import (
    ACTIVATIONS,
    ScratchConfig,
    ScratchDecoderConfig,
    ScratchEncoderConfig,
    ScratchSeq2SeqConfig,
)
from .layers_scratch import make_norm
from .ops_scratch import is_unmodified, linear_cross_entropy
from .stack_scratch import ScratchKwargs, ScratchPreTrainedModel, is_padding_mask, of_new_tokens


class LossKwargs(ScratchKwargs, total=False):
    """Arguments that only a loss needs. Behind `**kwargs`, since `Trainer` takes every name with "label" in a signature
    for labels that a batch must hold."""

    num_items_in_batch: Tensor | int | None  # targets to divide the summed loss by, in the stead of this batch's own
    label_smoothing: float  # probability spread over the vocabulary (section 5.4 of the paper)
    loss_only: bool  # compute the head on the targets alone and the layers without padding, and return no logits


LOSS_KWARGS = LossKwargs.__annotations__.keys() - ScratchKwargs.__annotations__.keys() | {"num_items_in_batch"}
ScratchPreTrainedModel.known_arguments.update(LOSS_KWARGS, ["shift_labels"])


def take_loss_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take them out of the arguments of a forward; what is left is the backbone's."""
    taken = {name: kwargs.pop(name) for name in LOSS_KWARGS if name in kwargs}  # torch 2.11 traces no `&` of sets
    if not 0 <= (taken.get("label_smoothing") or 0.0) < 1:
        raise ValueError(f"label_smoothing={taken['label_smoothing']} must be at least 0 and below 1")
    if taken.get("loss_only"):
        kwargs.setdefault("unpad_inputs", True)
    return taken


# --- Language models --------------------------------------------------------------------------------------------------


class ScratchLanguageModel(ScratchPreTrainedModel):
    """A backbone and a linear map to the vocabulary (section 3.4 of the paper); no softmax inside."""

    output_type: type[ModelOutput]
    supports_loss_only = True
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.word_embeddings.weight"}

    def __init__(self, config: ScratchConfig, backbone: ScratchPreTrainedModel, vocab_size: int):
        super().__init__(config)
        self.model = backbone
        self.lm_transform = ScratchTransform(config) if getattr(config, "lm_head_transform", False) else None
        self.lm_head = nn.Linear(config.hidden_size, vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def predict(
        self,
        outputs: ModelOutput,
        targets: Tensor | None,  # (B, T), aligned with the hidden states; -100 where there is nothing to predict
        attention_mask: Any = None,  # of the tokens that predict
        logits_to_keep: int | Tensor = 0,
        loss_only: bool = False,
        label_smoothing: float = 0.0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> ModelOutput:
        """The backbone's outputs, with logits and loss in the place of its last hidden states."""
        hidden_states = outputs.last_hidden_state
        if targets is not None:
            targets = leave_out_padding(targets.long(), attention_mask, outputs.get("past_key_values")).contiguous()
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden_states, targets = hidden_states[:, kept], None if targets is None else targets[:, kept].contiguous()
        logits = loss = None
        if targets is None or not loss_only:
            transformed = hidden_states if self.lm_transform is None else self.lm_transform(hidden_states)
            logits = self.shape_logits(self.lm_head(transformed))
        if targets is not None:
            if num_items_in_batch is None:
                num_items_in_batch = (targets != -100).sum().clamp(min=1)  # without a target the loss is 0, not NaN
            if logits is None:
                loss = self.total_loss(hidden_states, targets, label_smoothing) / num_items_in_batch
            elif label_smoothing:
                loss = token_loss(logits, targets, num_items_in_batch, label_smoothing)
            else:
                loss = self.loss_function(
                    logits=logits,
                    labels=targets,
                    shift_labels=targets,  # aligned already, also for the loss functions that would shift
                    vocab_size=logits.shape[-1],
                    num_items_in_batch=num_items_in_batch,
                )
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return self.output_type(loss=loss, logits=logits, **rest)

    def shape_logits(self, logits: Tensor) -> Tensor:
        scaling, cap = self.config.logits_scaling, self.config.final_logit_softcapping
        logits = logits if scaling == 1.0 else logits / scaling
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def total_loss(self, hidden_states: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """(B, T, D), (B, T) -> the sum of all losses, without keeping logits. Padding and unmasked tokens have no loss:
        they never reach the widest matrix of the model."""
        head, hidden_states, targets = self.lm_head, hidden_states.flatten(0, 1), targets.flatten()
        is_plain = self.config.logits_scaling == 1.0 and self.config.final_logit_softcapping is None
        is_fused = is_plain and is_unmodified(head)
        # A graph has no room for as many rows as there happen to be targets.
        if not is_fused or (self.lm_transform is not None and not torch.compiler.is_compiling()):
            has_target = targets != -100
            hidden_states, targets = hidden_states[has_target], targets[has_target]
        if self.lm_transform is not None:
            hidden_states = self.lm_transform(hidden_states)
        if not is_fused:
            return token_loss(self.shape_logits(head(hidden_states)), targets, 1, label_smoothing)
        return linear_cross_entropy(hidden_states, head.weight, head.bias, targets, label_smoothing)


class ScratchTransform(nn.Module):
    """BERT's last step before the vocabulary: a dense layer, the activation of the feed-forward layers, a norm."""

    def __init__(self, config: Any):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.lm_head_transform_bias)
        self.activation = ACTIVATIONS[config.hidden_act].function
        self.norm = make_norm(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_states)))


def leave_out_padding(targets: Tensor, attention_mask: Any, cache: Cache | None = None) -> Tensor:
    """(B, T) -> (B, T), with -100 where the token that predicts is padding, whose state means nothing and depends on
    the backend; native models predict the first token of a text from it where padding is on the left."""
    if not is_padding_mask(attention_mask):
        return targets
    total, length = attention_mask.shape[1] if cache is None else cache.get_seq_length(), targets.shape[1]
    return targets.masked_fill(of_new_tokens(attention_mask, length, total - length) == 0, -100)


def token_loss(
    logits: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy in nats, summed over real targets and divided by `num_items_in_batch`, or by their number."""
    loss = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten().long(), reduction="sum", label_smoothing=label_smoothing
    )
    return loss / ((targets != -100).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


# --- Classifiers ------------------------------------------------------------------------------------------------------


class ScratchClassifier(ScratchPreTrainedModel):
    """A backbone of either kind, dropout, and a linear map from each vector that `select` keeps."""

    backbone: Callable[[ScratchConfig], ScratchPreTrainedModel]
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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[LossKwargs],
    ) -> SequenceClassifierOutput | TokenClassifierOutput | MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, position_ids, inputs_embeds: as the backbone's.
            labels: (B,) classes, or numbers for a regression, (B, L) for several at once, for whole sequences; (B, T)
                for tokens, -100 where there is none; (B,) indices of the right choice among several texts.
            past_key_values: of a prefix, as PEFT learns one, which `attention_mask` counts too.

        Returns:
            `loss`; `logits` (B, L), (B, T, L) or (B, choices).
        """
        loss_kwargs = take_loss_kwargs(kwargs)
        inputs = dict(kwargs, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values)
        logits, recorded = self.score(input_ids, inputs_embeds, (labels,), inputs)
        count = loss_kwargs.get("num_items_in_batch")
        loss = None if labels is None else self.loss(logits, labels, count, attention_mask)
        return self.output_type(loss=loss, logits=logits, **recorded)

    def score(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        labels: tuple[Tensor | None, ...],  # to be checked before anything is computed
        inputs: dict[str, Any],  # the rest of what the backbone is given
    ) -> tuple[Tensor, dict[str, Any]]:
        """The head's logits for the vectors that `select` keeps, and what the backbone has recorded on the way."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        for each in labels:
            if each is not None and tokens is not None:
                check_labels(each, shape := self.label_shape(tokens, each), (*shape, 1))
        # There is no next token to keep a cache for.
        outputs = self.run_backbone(input_ids=input_ids, inputs_embeds=inputs_embeds, **{"use_cache": False} | inputs)
        logits = self.head(self.select(outputs, inputs["attention_mask"], input_ids))
        return logits, {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}

    def run_backbone(self, **inputs: Any) -> ModelOutput:
        return self.model(**inputs)

    def head(self, vectors: Tensor) -> Tensor:  # (..., D) -> (..., L)
        return getattr(self, self.head_name)(self.dropout(vectors))

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        """The shape of labels, given tokens (B, T) or embeddings (B, T, D): one for each text."""
        return inputs.shape[:1]

    def select(self, outputs: ModelOutput, attention_mask: Any, input_ids: Tensor | None) -> Tensor:
        """The vectors to classify, of the backbone's output: one for each token (B, T, D)."""
        return outputs.last_hidden_state

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any, attention_mask: Any) -> Tensor:
        return token_loss(logits, leave_out_padding(labels, attention_mask), num_items_in_batch)


class ScratchForSequenceClassification(ScratchClassifier):
    """One label, several, or one number, for a whole sequence."""

    _auto_class = "AutoModelForSequenceClassification"
    output_type = SequenceClassifierOutput

    def label_shape(self, inputs: Tensor, labels: Tensor) -> tuple[int, ...]:
        """Writes down in the configuration what the labels show to be asked for, as transformers' own models do."""
        if self.config.problem_type is None:
            kind = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            self.config.problem_type = "regression" if self.config.num_labels == 1 else kind
        single = self.config.problem_type == "single_label_classification" or self.config.num_labels == 1
        return inputs.shape[:1] if single else (len(inputs), self.config.num_labels)

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any, attention_mask: Any) -> Tensor:
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
        past_key_values: Cache | None = None,
        **kwargs: Unpack[LossKwargs],
    ) -> QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: first and last token of the answer (B,); beyond the text where it was cut
                off, which the loss then leaves out.

        Returns:
            `loss`, the mean of both ends; `start_logits` and `end_logits` (B, T).
        """
        loss_kwargs = take_loss_kwargs(kwargs)
        inputs = dict(kwargs, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values)
        logits, recorded = self.score(input_ids, inputs_embeds, (start_positions, end_positions), inputs)
        start_logits, end_logits = logits.movedim(-1, 0).contiguous()
        loss = None
        if start_positions is not None and end_positions is not None:
            losses = []
            for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
                targets = positions.masked_fill((positions < 0) | (positions >= logits.shape[1]), -100)
                losses.append(token_loss(logits, targets, loss_kwargs.get("num_items_in_batch")))
            loss = sum(losses) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start_logits, end_logits=end_logits, **recorded)


def check_labels(labels: Tensor, *shapes: tuple[int, ...]) -> None:  # those that fit, the usual one first
    if labels.shape not in shapes:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit the input: they must be {tuple(shapes[0])}")


def check_token_labels(labels: Tensor | None, inputs: Tensor | None) -> None:  # of tokens (B, T), or embeddings
    if labels is not None and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels is not None and inputs is not None:
        check_labels(labels, inputs.shape[:2])


# The Trainer (which labels it smooths, and whether shifted) and the pipelines look models up by class name in these
# tables; `AutoModel.register` does not write them.
for _config in (ScratchEncoderConfig, ScratchDecoderConfig, ScratchSeq2SeqConfig):
    for _auto_class, _reference in _config._auto_map.items():
        if _auto_class != "AutoConfig":
            _names = getattr(modeling_auto, _auto_class)._model_mapping._model_mapping
            _names[_config.model_type] = _reference.split(".")[1]
