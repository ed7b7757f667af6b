"""What each pipeline has to do with the tiny models, once transformers' mixin has loaded them.

transformers' own tests of this kind are not in its source distribution. The mixin calls `get_test_pipeline`, then
`run_pipeline_test`, then runs the examples through the pipeline in batches.
"""

from typing import Any

import torch
from transformers import Pipeline, PreTrainedModel, PreTrainedTokenizerBase, pipeline

EXAMPLES = ["this is a test", "what nobody has ever said about the model"]


class TextPipelineTests:
    """A pipeline of `task`: its results have the form that `check` asks for, and are the same in a padded batch."""

    task: str
    examples = EXAMPLES
    options: dict[str, Any] = {}

    def get_test_pipeline(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str = "float32", **processors: Any
    ) -> tuple[Pipeline, list[str]]:
        """The pipeline and the inputs for it."""
        made = pipeline(self.task, model=model, tokenizer=tokenizer, dtype=dtype, **self.options)
        return made, self.examples

    def run_pipeline_test(self, pipe: Pipeline, examples: list[str]) -> None:
        """Check the result of every example, alone and in a batch."""
        alone = [pipe(example) for example in examples]
        for example, result in zip(examples, alone, strict=True):
            self.check(pipe, example, result)
        together = pipe(examples, batch_size=len(examples))
        tolerance = 1e-4 if pipe.model.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(numbers(together), numbers(alone), rtol=tolerance, atol=tolerance)

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        raise NotImplementedError


def numbers(results: Any) -> list[float]:
    """Every number in nested results, in order."""
    if isinstance(results, dict):
        results = list(results.values())
    if isinstance(results, list):
        return [number for result in results for number in numbers(result)]
    return [] if isinstance(results, str) else [float(results)]


class FeatureExtractionPipelineTests(TextPipelineTests):
    task = "feature-extraction"

    def run_pipeline_test(self, pipe: Pipeline, examples: list[str]) -> None:
        # Features are not cut to each example's length, so there is no batch to compare with.
        for example in examples:
            (rows,) = pipe(example)
            assert len(rows) == len(pipe.tokenizer(example)["input_ids"])
            assert {len(row) for row in rows} == {pipe.model.config.hidden_size}
            assert all(isinstance(value, float) for row in rows for value in row)


class FillMaskPipelineTests(TextPipelineTests):
    task = "fill-mask"
    examples = ["this is a <mask>", "what <mask> has ever said about the model"]

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        assert len(result) == 5  # the default number of guesses
        scores = [guess["score"] for guess in result]
        assert scores == sorted(scores, reverse=True) and 0 < sum(scores) <= 1
        for guess in result:
            words = example.replace("<mask>", guess["token_str"])
            assert guess["sequence"].split() == [w for w in words.split() if w not in pipe.tokenizer.all_special_tokens]


class TextClassificationPipelineTests(TextPipelineTests):
    task = "text-classification"

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        (best,) = result
        labels = pipe.model.config.id2label.values()
        assert best["label"] in labels and 1 / len(labels) <= best["score"] <= 1


class TokenClassificationPipelineTests(TextPipelineTests):
    task = "token-classification"

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        assert [token["word"] for token in result] == example.split()
        assert all(token["entity"] in pipe.model.config.id2label.values() for token in result)


class TextGenerationPipelineTests(TextPipelineTests):
    task = "text-generation"
    options = {"max_new_tokens": 5, "do_sample": False}

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        (generated,) = result
        assert generated["generated_text"].startswith(example)
        (scored,) = pipe(example, return_full_text=False)
        assert generated["generated_text"] == example + scored["generated_text"]


class ZeroShotClassificationPipelineTests(TextPipelineTests):
    task = "zero-shot-classification"
    options = {"candidate_labels": ["test", "model", "words"]}

    def check(self, pipe: Pipeline, example: str, result: Any) -> None:
        assert result["sequence"] == example
        assert sorted(result["labels"]) == sorted(self.options["candidate_labels"])
        assert abs(sum(result["scores"]) - 1) < 1e-2
