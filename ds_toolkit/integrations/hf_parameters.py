"""Build a model of transformers without memory for its weights, and count its parameters.

Run by its path in a process of its own: a `config.json` on standard input, a JSON object on standard output.
Only classes that transformers ships are built, from sizes; no code, weight or address that the configuration
names is used.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

_MOST_MEMORY_BYTES = 8 * 2**30
# What a file may say about how a model is run: code, kernels and weights from elsewhere, none of it a size.
_NO_SIZE = re.compile(r"^(auto_map|custom_pipelines|quantization_config|_?name_or_path|.*_implementation.*)$")
# The kinds of model to try, in this order, where the file names no class.
_AUTO_CLASSES = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModel",
)
_EXPERTS_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)


class CannotCountError(Exception):
    """What failed, why, and what to do."""


def count(data: dict[str, Any]) -> dict[str, object]:
    """The parameters of the model that the configuration describes.

    Raises:
        CannotCountError: there is no such model in transformers, or no transformers.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise CannotCountError(
            "this family is counted by transformers, which is not installed here",
            str(error),
            "pip install transformers torch",
        ) from error
    version = f"transformers {transformers.__version__}"
    kind, has_code = data.get("model_type"), "auto_map" in data
    configurations = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in configurations:
        if has_code:
            raise _needs_code(f"models of the type `{kind}`", version)
        raise CannotCountError(
            f"models of the type `{kind}` are unknown to {version}",
            "no formula here counts them, and it has no class for them",
            "pip install -U transformers",
        )
    config = configurations[kind].from_dict(_sizes_alone(data))
    name = (data.get("architectures") or [None])[0]
    model_class = _model_class(transformers, name, config)
    if model_class is None and name is not None and has_code:
        raise _needs_code(f"`{name}`", version)
    with torch.device("meta"):
        model = model_class(config) if model_class else _first_that_builds(transformers, config)
        model.tie_weights()
    notes = []
    if model_class is None and name is not None:
        notes.append(f"{version} has no `{name}` for it")
    return {
        "class": type(model).__name__,
        "version": version,
        **_counts(model, config, notes),
        "notes": notes,
    }


def _needs_code(what: str, version: str) -> CannotCountError:
    return CannotCountError(
        f"{what} cannot be counted without the code that comes with the model (`auto_map`)",
        f"{version} has no class of its own for it, and code from a checkpoint is not run here",
        "",
    )


def _sizes_alone(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _sizes_alone(value) for key, value in data.items() if not _NO_SIZE.match(key)}
    return [_sizes_alone(value) for value in data] if isinstance(data, list) else data


def _model_class(transformers: Any, name: object, config: Any) -> Any:
    """The class of transformers by that name, if it is a model of this configuration."""
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    # Of all that transformers has by name, models alone have one.
    return found if isinstance(config, getattr(found, "config_class", None) or ()) else None


def _first_that_builds(transformers: Any, config: Any) -> Any:
    for name in _AUTO_CLASSES:
        # The classes refuse configurations that they have no model for.
        with contextlib.suppress(ValueError):
            return getattr(transformers, name).from_config(config)
    raise CannotCountError(
        f"transformers has no model for `{config.model_type}`", "its configuration stands alone", ""
    )


def _counts(model: Any, config: Any, notes: list[str]) -> dict[str, object]:
    text = config.get_text_config(decoder=True)
    embedding = None
    # Models of sounds, images and two halves have no one of them.
    with contextlib.suppress(NotImplementedError):
        embedding = model.get_input_embeddings()
    sizes = [parameter.numel() for parameter in model.parameters()]
    hidden = int(getattr(text, "hidden_size", 0) or getattr(embedding, "embedding_dim", 0))
    layers = getattr(text, "num_hidden_layers", None)
    blocks = _blocks(model)
    if getattr(config, "is_encoder_decoder", False):
        # Most such configurations have one number for both halves, or call the encoder's `num_hidden_layers`.
        layers = len(blocks)
        notes.append("activations are those of as many blocks of a decoder: cross-attention is not counted")
    elif text is not config:
        notes.append("activations are those of the text part alone")
    answer: dict[str, object] = {
        "tensor_sizes": sizes,
        "largest_block": max((_size(block) for block in blocks), default=0),
        "hidden_size": hidden,
        "num_layers": layers or len(blocks),
        "vocabulary_size": getattr(text, "vocab_size", None) or 1,
        "experts": _experts(model, text, hidden, sum(sizes)),
    }
    if answer["experts"] is None and any(_expert_modules(model)):
        notes.append("how many experts a token passes is not known: compute and activations go by all")
    return answer


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _blocks(model: Any) -> list[Any]:
    """The members of the lists of modules that lie in no other list."""
    import torch

    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [block for name in outer for block in model.get_submodule(name).children()]


def _expert_modules(model: Any) -> Any:
    """The modules that hold a block's experts: a list of them, or tensors with one row an expert."""
    import torch

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "experts" and next(module.parameters(), None) is not None:
            if isinstance(module, torch.nn.ModuleList):
                yield len(module), _size(module)
            elif tensors := [tensor for tensor in module.parameters(recurse=False) if tensor.dim() == 3]:
                yield tensors[0].shape[0], _size(module)


def _experts(model: Any, text: Any, hidden: int, total: int) -> dict[str, int] | None:
    routed = list(_expert_modules(model))
    per_token = next((n for key in _EXPERTS_A_TOKEN if isinstance(n := getattr(text, key, None), int)), None)
    if not routed or per_token is None:
        return None
    idle = sum(size * max(0, number - per_token) // number for number, size in routed)
    # A gated expert of width d has 3 h d weights; so has what all tokens share.
    shared = [_size(module) for name, module in model.named_modules() if re.search(r"\.shared_[a-z]+$", name)]
    one_block = per_token * max(size // number for number, size in routed) + max(shared, default=0)
    return {
        "num_active_parameters": total - idle,
        "experts_per_token": per_token,
        "active_width": one_block // (3 * hidden),
    }


def main() -> None:
    """Answer the configuration on standard input."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    # Modules beside this one must not pass for the frameworks that they are called after.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    try:
        # What libraries print is not the answer.
        with contextlib.redirect_stdout(sys.stderr):
            answer = count(json.load(sys.stdin))
    except CannotCountError as error:
        answer = {"error": dict(zip(("what", "why", "fix"), error.args, strict=True))}
    except Exception as error:
        # Whatever a model's own code makes of a broken size.
        answer = {"error": {"what": "", "why": f"{type(error).__name__}: {error}", "fix": ""}}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
