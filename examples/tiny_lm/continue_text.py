"""Continue a sentence with consolidated weights: plain PyTorch, no DeepSpeed.

python continue_text.py model.bin "The lamp "
"""

from __future__ import annotations

import sys

import torch
from model import CONTEXT, TinyLM


def main() -> None:
    weights_path, prompt = sys.argv[1:]
    model = TinyLM()
    model.load_state_dict(torch.load(weights_path, weights_only=True), strict=True)
    model.eval()
    print(continued(model, prompt, num_bytes=160))


@torch.inference_mode()
def continued(model: TinyLM, prompt: str, num_bytes: int) -> str:
    """The prompt and `num_bytes` more bytes, the likeliest each time."""
    tokens = list(prompt.encode())
    for _ in range(num_bytes):
        logits = model(torch.tensor([tokens[-CONTEXT:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens).decode(errors="replace")


if __name__ == "__main__":
    main()
