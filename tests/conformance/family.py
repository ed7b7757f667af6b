"""What the three families' tests share: the mixins of transformers, a model tester, and tiny models for pipelines."""

import contextlib
import os
import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

from pipeline_tasks import EXAMPLES
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from upstream import (
    FSDP_DISTRIBUTED_TEST_MODEL_TYPES,
    PIPELINE_MODELS,
    TP_DISTRIBUTED_TEST_MODEL_TYPES,
    ConfigTester,
    FSDPTesterMixin,
    ModelTesterMixin,
    PipelineTesterMixin,
    TensorParallelTesterMixin,
    TrainingTesterMixin,
    ids_tensor,
    pipeline_test_mapping,
    random_attention_mask,
    tiny_model_summary,
)

PAD, BOS, EOS = range(3)
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]

# The sizes of every model here, ours and native.
VOCABULARY, WIDTH, INNER_WIDTH, HEADS, LAYERS, POSITIONS = 99, 32, 64, 4, 2, 512


class ModelTester:
    """The sizes that the mixins read, and configurations and inputs of those sizes."""

    batch_size = 3
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    num_choices = 4
    hidden_size, num_attention_heads, num_hidden_layers = WIDTH, HEADS, LAYERS
    is_training = True

    def __init__(self, test: "FamilyTest"):
        self.test = test
        # The class that the tensor-parallel tests run; they take none for the other families.
        self.causal_lm_class = test.causal_lm_class

    def get_config(self) -> PreTrainedConfig:
        return self.test.config_class(**self.test.config_values)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        shape = (self.batch_size, self.seq_length)
        inputs = {"input_ids": ids_tensor(shape, VOCABULARY).clamp(min=len(SPECIAL_TOKENS))}
        inputs["attention_mask"] = random_attention_mask(list(shape))
        if self.test.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids_tensor(shape, VOCABULARY).clamp(min=len(SPECIAL_TOKENS))
            inputs["decoder_attention_mask"] = inputs["input_ids"].new_ones(shape)
        return self.get_config(), inputs


class FamilyTest(
    ModelTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    FSDPTesterMixin,
    PipelineTesterMixin,
):
    """One model of one family under all of transformers' common tests; a subclass names the model."""

    is_native: ClassVar[bool] = False
    config_class: ClassVar[type[PreTrainedConfig]]
    config_values: ClassVar[dict[str, Any]]
    all_model_classes: ClassVar[tuple[type[PreTrainedModel], ...]]
    pipeline_model_mapping: ClassVar[dict[str, type[PreTrainedModel]]] = {}
    trained_class: ClassVar[type[PreTrainedModel]]
    causal_lm_class: ClassVar[type[PreTrainedModel] | None] = None
    model_tester: ModelTester

    # About the testers inside transformers' tree, not about a model.
    test_generation_tester_mixin_inheritance = None
    # The mixin leaves out models whose file carries no copyright line of 2023 or later.
    test_can_init_all_missing_weights_before_2023 = True

    @classmethod
    def setUpClass(cls) -> None:
        model_type = cls.config_class.model_type
        if cls.causal_lm_class is not None:  # the distributed tests run on causal models, of the types listed
            FSDP_DISTRIBUTED_TEST_MODEL_TYPES.add(model_type)
            TP_DISTRIBUTED_TEST_MODEL_TYPES.add(model_type)
        for task, model_class in cls.pipeline_model_mapping.items():
            test = pipeline_test_mapping[task]["test"].rsplit(".", 1)[-1]
            pipeline_test_mapping[task]["test"] = f"pipeline_tasks.{test}"
            cls._save_for_pipelines(model_class)

    @classmethod
    def _save_for_pipelines(cls, model_class: type[PreTrainedModel]) -> None:
        folder = os.path.join(PIPELINE_MODELS.name, cls.config_class.model_type, model_class.__name__)
        model_class(cls.config_class(**cls.config_values)).save_pretrained(folder)
        vocabulary = SPECIAL_TOKENS + sorted({word for example in EXAMPLES for word in example.split()})
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
        names = ("pad_token", "bos_token", "eos_token", "mask_token", "unk_token")
        special_tokens = dict(zip(names, SPECIAL_TOKENS, strict=True))
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=POSITIONS, **special_tokens
        ).save_pretrained(folder)
        tiny_model_summary[model_class.__name__] = {
            "tokenizer_classes": ["PreTrainedTokenizerFast"],
            "processor_classes": [],
        }

    def setUp(self) -> None:
        self.model_tester = ModelTester(self)

    @contextlib.contextmanager
    def subTest(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # pytest would report the parts of a test apart from it. Here one that fails fails the test, one that is skipped
        # does not end it.
        with contextlib.suppress(unittest.SkipTest):
            yield

    def test_config(self) -> None:
        ConfigTester(self, config_class=self.config_class, **self.config_values).run_common_tests()

    def _get_trainable_model_class(self) -> type[PreTrainedModel]:
        return self.trained_class
