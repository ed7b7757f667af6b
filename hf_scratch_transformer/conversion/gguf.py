"""Our language models as GGUF, the files of llama.cpp and what is built on it, by its own Python package."""

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_scratch import rotary_dim
from ..files import reading
from ..stack_scratch import ScratchPreTrainedModel
from ..tokenization import WORDS
from .comparison import NEW, PROMPT, Comparison, compare, follow, greedily, row_by_row
from .folders import IN_SINGLE, Saved, convert_to
from .weights import in_short

GgufConfig = getattr(transformers, "GgufConfig", None)


class Form(NamedTuple):
    """How GGUF stores a native architecture."""

    name: str  # of llama.cpp's architecture
    neighbours: bool = False  # what is turned together stands together
    one_plus: bool = False  # norms are stored with the one that theirs leave out
    head_apart: bool = False  # llama.cpp opens no file without a head, though it be the table again
    fixed: Mapping[str, Any] = {}  # what its files do not say, since it is always so


SILU = {"hidden_act": "silu"}
FORMS = {  # by native architecture; a model is stored as the first that it can become
    "llama": Form("LLAMA", neighbours=True, fixed={**SILU, "mlp_bias": False}),
    "qwen2": Form("QWEN2", fixed=SILU),
    "qwen3": Form("QWEN3", fixed=SILU),
    "starcoder2": Form(
        "STARCODER2", fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None}
    ),
    "nemotron": Form("NEMOTRON", one_plus=True, head_apart=True, fixed={"hidden_act": "relu2"}),
}
FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}


def write(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> None:
    """Write one file with parameters, configuration and tokenizer. Matrices keep their type.

    Raises:
        ValueError: if the model or its tokenizer has options that GGUF does not know.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{saved.folder} is a {type(model).__name__}; language models become gguf")
    name, native = _native(model)
    writer = gguf.GGUFWriter(new, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[FORMS[name].name]])
    _add_configuration(writer, native)
    _add_tokenizer(writer, saved.tokenizer(), native.config)
    _add_parameters(writer, native, FORMS[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> Comparison:
    """What llama.cpp computes by this file, and writes, beside the model, a row at a time."""
    import llama_cpp

    dtype = saved.dtype
    words = model.config.vocab_size
    limit = PROMPT + NEW
    with reading(f"{new.name}, which llama.cpp cannot open"):
        single = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)  # of what the cache holds; else half
        engine = llama_cpp.Llama(str(new), n_ctx=limit, n_threads=1, logits_all=True, verbose=False, **single)

    def write(_: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        engine.reset()

        def step(tokens: Tensor) -> Tensor:
            engine.eval(tokens[0].tolist())
            return torch.from_numpy(engine.scores[engine.n_tokens - 1 : engine.n_tokens, :words].copy())[None]

        return greedily(step, text, count)

    return follow(model, row_by_row(write), dtype)


def read_back(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> Comparison:
    """What transformers computes by this file, and writes, beside the model."""
    with reading(f"{new.name}, which transformers cannot read back (install llama-cpp-python, or --no-verify)"):
        read, _ = open_gguf(new, **IN_SINGLE)
    return compare(model, read)


def open_gguf(path: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A file as transformers reads it, and what it missed there. Heads are as wide as the file says, which transformers
    passes over in one of Qwen3.

    Raises:
        ValueError: on tensors and settings that it passes over, without which the model would compute something else.
    """
    file = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config: Any = AutoConfig.from_pretrained(**file)
    reader = gguf.GGUFReader(path)
    name = reader.fields["general.architecture"].contents()
    own = {key: field for key, field in reader.fields.items() if key.startswith(f"{name}.")}  # not the vocabulary
    said = {key.removeprefix(f"{name}."): field.contents() for key, field in own.items()}
    if hasattr(config, "head_dim") and "attention.key_length" in said:
        config.head_dim = said["attention.key_length"]
    # Newer versions of transformers would keep the blocks of the file as they are.
    whole = {"quantization_config": GgufConfig(dequantize=True)} if GgufConfig is not None else {}
    read, found = AutoModelForCausalLM.from_pretrained(
        **file, config=config, **whole, **options, output_loading_info=True
    )
    (architecture,) = (each for each, called in gguf.MODEL_ARCH_NAMES.items() if called == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    taken = {names.get_name(each, try_suffixes=(".weight", ".bias")) for each in read.state_dict()}
    passed = [each.name for each in reader.tensors if each.name not in taken]
    passed += [f"{key}={said[key]}" for key, value in _settings(config).items() if said.get(key, value) != value]
    if passed:
        raise ValueError(f"transformers passes over {in_short(passed)}")
    return read, found


def _settings(config: Any) -> dict[str, Any]:
    """What a file may say that transformers does not read for every architecture, as the model that it made has it."""
    rope = getattr(config, "rope_parameters", None)
    settings = {"attention.sliding_window": getattr(config, "sliding_window", None), "attention.causal": True}
    if rope is not None and "rope_type" in rope:
        settings |= dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), rope.get("factor", 1.0))
        settings["rope.scaling.attn_factor"] = rope.get("attention_factor") or 1.0
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kind = rope["rope_type"]
        settings |= {"attention.value_length": width, "rope.dimension_count": rotary_dim(width, rope)}
        settings["rope.scaling.type"] = "none" if kind == "default" else kind
    return settings


def _native(model: Any) -> tuple[str, PreTrainedModel]:
    reasons = []
    for name, form in FORMS.items():
        try:
            native = convert_to(model, name)
        except ValueError as error:
            reasons.append(str(error))
            continue
        held = {each: getattr(native.config, each) for each in form.fixed}
        wrong = [
            f"{each}={held[each]!r} must be {value!r}" for each, value in form.fixed.items() if held[each] != value
        ]
        if not wrong:
            return name, native
        reasons.append(f"{name} as gguf: {', '.join(wrong)}")
    raise ValueError("no architecture that is written as gguf has these options: " + "; ".join(reasons))


def _add_configuration(writer: Any, model: PreTrainedModel) -> None:
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_parameters={rope}: only rope_type='default' is written as gguf")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim(head_dim, rope))
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon if hasattr(config, "norm_epsilon") else config.norm_eps)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[model.dtype]])


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    split = described["pre_tokenizer"] or {}
    *before, last = split.get("pretokenizers") or [split]
    patterns = [each.get("pattern", {}).get("Regex") for each in before]
    is_known = patterns == [WORDS] or (not patterns and last.get("use_regex"))
    if described["model"]["type"] != "BPE" or last.get("type") != "ByteLevel" or not is_known:
        raise ValueError("tokenizer: only byte-level BPE over words, as GPT-2's and ours, is written as gguf")
    for token, number in tokenizer.get_vocab().items() if patterns else ():
        text = tokenizer.decode([number])
        if any(unicodedata.category(letter).startswith("M") for letter in text[1:]):
            raise ValueError(f"tokenizer: {token!r} ({text}) has a combining mark, at which words of gguf's files end")
    names = dict.fromkeys(range(config.vocab_size), "")
    names |= {number: token for token, number in tokenizer.get_vocab().items()}
    kinds = {number: gguf.TokenType.NORMAL if token else gguf.TokenType.UNUSED for number, token in names.items()}
    for added in described["added_tokens"]:
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    order = sorted(names)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[number] or f"[unused{number}]" for number in order])
    writer.add_token_types([kinds[number] for number in order])
    merges = described["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    for part in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{part}_token_id")) is not None:
            getattr(writer, f"add_{part}_token_id")(number)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(encoded[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(bool(last["add_prefix_space"]))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _add_parameters(writer: Any, model: PreTrainedModel, form: Form) -> None:
    config: Any = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[form.name], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys and not form.head_apart:
            continue
        if form.neighbours and (count := heads.get(name.split(".")[-2])):
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if form.one_plus and name.endswith("norm.weight"):
            tensor = 1 + tensor.float()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"{name} has no name in gguf")
        writer.add_tensor(stored, *_numbers(tensor))


def _numbers(tensor: Tensor) -> tuple[Any, ...]:
    """As numpy has them; vectors in single precision, as llama.cpp wants them."""
    if tensor.ndim == 1 or tensor.dtype == torch.float32:
        return (tensor.float().contiguous().numpy(),)
    if tensor.dtype == torch.float16:
        return (tensor.contiguous().numpy(),)
    kind = gguf.GGMLQuantizationType.BF16
    data = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
    return data, None, kind
