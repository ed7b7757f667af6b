"""Tokenizers trained from text, with the special tokens of one model family, loadable by plain `AutoTokenizer`.

Nothing here is a tokenizer class of our own: the `tokenizers` library trains and runs them, and what comes out is the
stock fast tokenizer of transformers, so a saved folder opens in a process that has never seen this package.

===========  ========  =====================================  ==========================================
algorithm    families  text back from ids                     source
===========  ========  =====================================  ==========================================
`byte_bpe`   all       exact, for any text                    arXiv:1508.07909, over bytes as in GPT-2
`wordpiece`  encoder   readable, with spaces guessed          arXiv:1810.04805
`char`       all       exact, for the characters of a corpus  one token a character
===========  ========  =====================================  ==========================================

=========  ================================================  ===============  =======================
family     special tokens, in the order of their ids         one text         two texts
=========  ================================================  ===============  =======================
`encoder`  `[PAD] [UNK] [CLS] [SEP] [MASK]`                  `[CLS] A [SEP]`  `[CLS] A [SEP] B [SEP]`
`decoder`  `<|pad|> <|unk|> <|endoftext|>` (both bos, eos)   `A`              `A B`
`seq2seq`  `<pad> <unk> <s> </s>` (bos `<s>`, eos `</s>`)    `A </s>`         `A </s> B </s>`
=========  ================================================  ===============  =======================

- `byte_bpe` knows every byte, so it has no unknown token and the ids after it move down by one.
- A decoder's text gets no special token by itself, for a prompt must stay open at its end. A training stream is made of
  documents that each end in `eos_token_id`, then the next one starts: the same token rightly opens an empty prompt.
- Padding has a token of its own in every family: masking pads out of the loss never masks the end of a text.
- A translator's source and target share one vocabulary (arXiv:1706.03762, section 5.1) when the corpus holds both
  languages. Targets go through `text_target=`, and the decoder starts with `<s>`.
- Pads go to the right; batched generation with a decoder passes `padding_side="left"`.
- Special tokens written out in a text are read as such, unless the call says `split_special_tokens=True`.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import LARGE_INTEGER

from .tokenization_scratch import ScratchTranslationTokenizer

# What byte_bpe takes for words, as GPT-2 does (Radford et al. 2019), but that marks belong to the letters they stand
# on: the vowels of Arabic and of the scripts of India, or accents apart, would each part a word.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}[\p{L}\p{M}]*| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LONGEST_WORD = 1000  # bytes, for the trainer of byte_bpe
# Tokens: trainers set memory for all of them aside at once, and end the process where it is not there.
LARGEST_VOCABULARY = 2**24

Family = Literal["encoder", "decoder", "seq2seq"]
Algorithm = Literal["byte_bpe", "wordpiece", "char"]


class _Layout(NamedTuple):
    """Special tokens by role, in the order of their ids; where they stand; the algorithms that suit, default first."""

    roles: dict[str, str]
    single: str
    pair: str
    algorithms: tuple[Algorithm, ...]


_LAYOUTS: dict[Family, _Layout] = {
    "encoder": _Layout(
        dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"),
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        ("wordpiece", "byte_bpe", "char"),
    ),
    # WordPiece forgets the spaces, so a model that writes text must not use it.
    "decoder": _Layout(
        dict(pad_token="<|pad|>", unk_token="<|unk|>", bos_token="<|endoftext|>", eos_token="<|endoftext|>"),
        "$A",
        "$A $B:1",
        ("byte_bpe", "char"),
    ),
    "seq2seq": _Layout(
        dict(pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"),
        "$A </s>",
        "$A </s> $B:1 </s>:1",
        ("byte_bpe", "char"),
    ),
}


def read_lines(*paths: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of UTF-8 text files, one after the other, line ends kept as they are (they are tokens too).

    Raises:
        ValueError: at once for a path that is no file; while reading for bytes that are not UTF-8 (with file and line).
    """
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"no such text file: {path}")
    return (line for path in paths for line in _decoded_lines(path))


def _decoded_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error


def train_tokenizer(
    corpus: Iterable[str],
    *,
    family: Family,
    algorithm: Algorithm | None = None,
    vocab_size: int = 8000,
    min_frequency: int = 2,
    lowercase: bool = False,
    add_prefix_space: bool = False,
    model_max_length: int | None = None,
    show_progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts and dress it for one model family; the same corpus always gives the same tokenizer.

    Args:
        corpus: texts, from anywhere; `read_lines("train.en", "train.de")` for files. WordPiece holds it in memory.
        family: decides the special tokens and where they are put (see the top of this module).
        algorithm: `wordpiece` for an encoder and `byte_bpe` for the others if not given.
        vocab_size: most tokens in all, special ones included; a small corpus gives fewer.
        min_frequency: how often a pair must occur to be merged into a new piece; single characters are always kept.
        lowercase: fold case first (accents stay: German needs them). Ids then give lower-case text back.
        add_prefix_space: of `byte_bpe`: read a text as if a space stood before it, so that its first word is the token
            that it is elsewhere, and leave one space out before the text that ids give back.
        model_max_length: tokens after which `truncation=True` cuts, special ones included; unlimited if not given.
        show_progress: draw a progress bar.

    Raises:
        ValueError: unknown family or algorithm, an algorithm that does not suit the family, a space before texts for
            one that keeps no spaces with words, a number below 1, a corpus
            that is a bare string or path, holds something other than `str` or no text at all, or a `vocab_size`
            below what the special tokens and single characters (256 bytes for `byte_bpe`) need, or beyond all reason.
    """
    if family not in _LAYOUTS:
        raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(_LAYOUTS)}")
    layout = _LAYOUTS[family]
    algorithm = algorithm or layout.algorithms[0]
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(get_args(Algorithm))}")
    if algorithm not in layout.algorithms:
        raise ValueError(f"algorithm={algorithm!r} does not suit family={family!r}: its ids do not give the text back")
    if add_prefix_space and algorithm != "byte_bpe":
        raise ValueError(f"add_prefix_space=True is an option of byte_bpe, not of algorithm={algorithm!r}")
    numbers = {"vocab_size": vocab_size, "min_frequency": min_frequency, "model_max_length": model_max_length}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if vocab_size >= LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size} must be below {LARGEST_VOCABULARY}")
    if isinstance(corpus, str | bytes | os.PathLike):
        raise ValueError("corpus must be an iterable of texts: [text], or read_lines(path) for a file")

    roles = {role: token for role, token in layout.roles.items() if role != "unk_token" or algorithm != "byte_bpe"}
    # Byte-level pieces hold the space before a word: [MASK] must take it in, or it would be left over as a piece.
    special_tokens = [
        AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]" and algorithm == "byte_bpe")
        for token in dict.fromkeys(roles.values())
    ]
    tokenizer = _pipeline(algorithm, lowercase, roles.get("unk_token"), add_prefix_space)
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "min_frequency": min_frequency,
        "show_progress": show_progress,
        "special_tokens": special_tokens,
    }
    if algorithm == "byte_bpe":
        # A merge costs the trainer the length of each word it is in: words without an end are cut, but only for it.
        words = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(length=LONGEST_WORD)])
        bytes_first = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
        tokenizer.train_from_iterator(_checked(corpus), bytes_first)
        tokenizer.pre_tokenizer = words
    elif algorithm == "char":
        every_one = trainers.WordLevelTrainer(**options | {"vocab_size": sys.maxunicode, "min_frequency": 1})
        tokenizer.train_from_iterator(_checked(corpus), every_one)
    else:
        # The trainer numbers the letters in the order of a randomly seeded hash map and breaks ties by number, so that
        # two runs differ. A first pass, without merges, finds the letters; the second gets them already numbered.
        texts = list(_checked(corpus))
        scratch = _pipeline(algorithm, lowercase, roles.get("unk_token"))
        scratch.train_from_iterator(texts, trainers.WordPieceTrainer(**options | {"vocab_size": 0}))
        letters = sorted(scratch.get_vocab().keys() - set(roles.values()))
        options["special_tokens"] = [*special_tokens, *letters]
        scratch.train_from_iterator(texts, trainers.WordPieceTrainer(**options))
        tokenizer.model = scratch.model
        tokenizer.add_special_tokens(special_tokens)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: the special tokens and every single "
            f"{'byte' if algorithm == 'byte_bpe' else 'character'} need {tokenizer.get_vocab_size()}"
        )

    ids = [(token.content, tokenizer.token_to_id(token.content)) for token in special_tokens]
    template = processors.TemplateProcessing(single=layout.single, pair=layout.pair, special_tokens=ids)
    # Trimmed offsets point at the word without the space before it, as the spans of labelled data do.
    trim = [processors.ByteLevel(trim_offsets=True)] if algorithm == "byte_bpe" else []
    tokenizer.post_processor = processors.Sequence([*trim, template])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **roles,
    )


def _pipeline(
    algorithm: Algorithm, lowercase: bool, unk_token: str | None, add_prefix_space: bool = False
) -> Tokenizer:
    """An untrained tokenizer: how text is cleaned, cut, and put together again."""
    cleaning: list[normalizers.Normalizer] = []
    if algorithm == "byte_bpe":
        tokenizer = Tokenizer(models.BPE())
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), bytes_])
        tokenizer.decoder = decoders.ByteLevel()
        if add_prefix_space:  # it would come back from the ids
            cleaning += [normalizers.Replace(Regex(r"\A "), ""), normalizers.Prepend(" ")]
            tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    elif algorithm == "char":
        tokenizer = Tokenizer(models.WordLevel(unk_token=unk_token))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=unk_token))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        cleaning += [normalizers.NFC(), normalizers.BertNormalizer(lowercase=False, strip_accents=False)]
    if lowercase:
        cleaning.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence(cleaning)
    return tokenizer


def _checked(corpus: Iterable[str]) -> Iterator[str]:
    """The same texts; ValueError for an item that is not text, and at the end if nothing but white space came."""
    blank = True
    for number, text in enumerate(corpus):
        if not isinstance(text, str):
            raise ValueError(f"corpus item {number} is of type {type(text).__name__}, expected str; see read_lines")
        blank = blank and not text.strip()
        yield text
    if blank:
        raise ValueError("corpus is empty: it holds no text to train a tokenizer on")


def join_tokenizers(source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast) -> ScratchTranslationTokenizer:
    """Tokenizers of two languages, trained for `seq2seq`, as one of a translator that has a vocabulary for each.

    Raises ValueError where a special token has another id in one of them.
    """
    return ScratchTranslationTokenizer(
        tokenizer_object=source.backend_tokenizer,
        target_tokenizer_object=target.backend_tokenizer,
        model_max_length=min(source.model_max_length, target.model_max_length),
        model_input_names=source.model_input_names,
        padding_side=source.padding_side,
        clean_up_tokenization_spaces=False,
        **source.special_tokens_map,
    )


def sides(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The tokenizers of source and target: twice the same one, unless each side has a vocabulary."""
    return getattr(tokenizer, "source", tokenizer), getattr(tokenizer, "target", tokenizer)


def config_fields(tokenizer: PreTrainedTokenizerFast, family: Family) -> dict[str, int]:
    """The config fields that a tokenizer decides, to be passed on: `ScratchDecoderConfig(**config_fields(...), ...)`.

    `vocab_size` and, as far as the tokenizer has them, `pad_token_id`, `bos_token_id` and `eos_token_id`; for
    `seq2seq` also `decoder_start_token_id`, which is the id of `<s>`, and where each side has a vocabulary
    `decoder_vocab_size` and that their embeddings are not shared.
    """
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if family == "seq2seq":
        ids["decoder_start_token_id"] = tokenizer.bos_token_id
        source, target = sides(tokenizer)
        if target is not source:
            ids |= {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": False}
    return {"vocab_size": len(tokenizer)} | {name: value for name, value in ids.items() if value is not None}


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, config: PreTrainedConfig, *, target: bool = False) -> None:
    """Refuse a tokenizer that a model with this config cannot use.

    A larger `config.vocab_size` is fine (tables are often rounded up). With `target=True` the tokenizer is the one of a
    translator's target language, where it has a vocabulary apart: `config.decoder_vocab_size` counts.

    Raises:
        ValueError: more tokens than rows in the embedding table, a special token with another id than the config has,
            or texts cut later (`model_max_length`) than the model has positions. Names the field and both values.
    """
    check_rows(tokenizer, config, target=target)
    # Not decoder_start_token_id: checkpoints of other families may start with the pad or the end instead.
    fields = config_fields(tokenizer, "decoder")
    del fields["vocab_size"]
    for name, value in fields.items():
        given = getattr(config, name, None)
        if value not in (given if isinstance(given, list) else [given]):
            raise ValueError(f"the tokenizer has {name}={value}, the config {name}={given}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < tokenizer.model_max_length < LARGE_INTEGER:
        raise ValueError(
            f"the tokenizer has model_max_length={tokenizer.model_max_length}, the config "
            f"max_position_embeddings={longest}"
        )


def check_rows(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, *, target: bool = False) -> None:
    """Of what `check_tokenizer` refuses, more tokens than rows in the embedding table."""
    own_table = target and getattr(config, "decoder_vocab_size", None) is not None
    table = "decoder_vocab_size" if own_table else "vocab_size"
    if len(tokenizer) > getattr(config, table):
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the config {table}={getattr(config, table)}")


def check_unknown(tokenizer: Any) -> None:
    """Raises ValueError for a token of the unknown that is unknown itself: transformers would look for it for ever."""
    if tokenizer.unk_token is not None and tokenizer.unk_token not in tokenizer.get_vocab():
        raise ValueError(f"unk_token: {tokenizer.unk_token!r} is not in the vocabulary")
