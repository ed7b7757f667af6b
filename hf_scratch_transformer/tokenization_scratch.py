"""The tokenizer of a translator whose two languages have a vocabulary each."""

import os
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

TARGET_FILE = "target_tokenizer.json"


class ScratchTranslationTokenizer(PreTrainedTokenizerFast):
    """Two vocabularies, as `MarianTokenizer` has them with `separate_vocabs`, in `tokenizer.json` and
    `target_tokenizer.json`.

    `tokenizer(texts)` gives ids of the source, `text_target=` those of the target; ids are decoded as the target's,
    which is what a translator writes. `source` and `target` are the tokenizers of the two sides alone. Special tokens
    have the same ids on both. Without a target vocabulary it is the tokenizer of one language.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json", "target_tokenizer_file": TARGET_FILE}
    _auto_class = "AutoTokenizer"

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        return kwargs  # each file is a whole tokenizer, of which nothing has to be put together again

    def __init__(
        self,
        *args: Any,
        target_tokenizer_object: Tokenizer | None = None,
        target_tokenizer_file: str | None = None,
        separate_vocabs: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            target_tokenizer_object, target_tokenizer_file: the target's, as `tokenizer_object` and `tokenizer_file` are
                the source's.
            separate_vocabs: saved with the tokenizer, so that a folder without its target's file is refused.

        Raises:
            ValueError: the target's is missing or damaged, or a special token has another id there.
        """
        target = target_tokenizer_object
        if target is None and target_tokenizer_file is not None:
            try:
                target = Tokenizer.from_file(target_tokenizer_file)
            except Exception as error:  # the library has no other, and does not say which file
                raise ValueError(f"{target_tokenizer_file}: {error}") from error
        if separate_vocabs and target is None:
            raise ValueError(f"separate_vocabs=True: {kwargs.get('name_or_path', '')} has no {TARGET_FILE}")
        super().__init__(*args, separate_vocabs=target is not None, **kwargs)
        options = {name: getattr(self, name) for name in ("model_max_length", "padding_side", "truncation_side")}
        options |= {"clean_up_tokenization_spaces": False} | self.special_tokens_map
        self.source = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, **options)
        self.target = self.source if target is None else PreTrainedTokenizerFast(tokenizer_object=target, **options)
        for token in self.all_special_tokens:
            ids = [side.convert_tokens_to_ids(token) for side in (self.source, self.target)]
            if ids[0] != ids[1]:
                raise ValueError(f"{token!r} must have one id on both sides, got {ids[0]} and {ids[1]}")
        self._switch_to_input_mode()

    def _switch_to_input_mode(self) -> None:
        self._tokenizer: Tokenizer = self.source.backend_tokenizer

    def _switch_to_target_mode(self) -> None:
        self._tokenizer = self.target.backend_tokenizer

    def _decode(self, token_ids: int | list[int], *args: Any, **kwargs: Any) -> str:
        return self.target._decode(token_ids, *args, **kwargs)

    def _save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, filename_prefix: str | None = None, **kwargs: Any
    ) -> tuple[str, ...]:
        files = super()._save_pretrained(save_directory, *args, filename_prefix=filename_prefix, **kwargs)
        if self.target is self.source:
            return files
        path = os.path.join(save_directory, f"{filename_prefix}-{TARGET_FILE}" if filename_prefix else TARGET_FILE)
        self.target.backend_tokenizer.save(path)
        return (*files, path)
