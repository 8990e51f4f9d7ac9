"""Make and store the test cases of an exported folder: inputs, and the outputs of the eager model."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence

import torch

from ..core.effects import undisturbed
from ..core.private_names.of_torch import pytree
from ..declare.scopes import register_flattening_functions
from ..export.proof.eager_runs import Case, EagerRuns, clone, in_one_thread
from ..export.quantization import read_by_model
from ..registry.recipe.aliases import TransformersModel
from ..storage.cases import StoredCase, save_case
from ..trees.walk import leaf_names, output_names
from .pieces.text import Piece, encoder_input, input_name
from .pieces.vision_language import with_pictures
from .texts import plain_loop

CASES = "cases"  # the subfolder of an exported folder that contains test inputs and expected outputs
PROMPT = 9  # number of tokens of a prompt
TOKENS = 40  # number of tokens generated in the stored test: with the prompt, more than a small sliding window
SAMPLED_TOKENS = 8  # the same with `proof="sample"`, because a large model can take a second per token


@torch.no_grad()
def generation_case(
    model: TransformersModel,
    task: str,
    rows: int = 3,
    tokens: int = TOKENS,
    length: int = PROMPT,
    prompts: dict[str, torch.Tensor] | None = None,
) -> StoredCase:
    """Make a test case: text that the eager model generates greedily; two of three prompts are padded on the left."""
    # returns: inputs: arguments of `generate`; outputs: prompt and new tokens, of shape (batch, length), the requested
    # number of new tokens, and the margin between the two best scores of each new token, infinite for the prompt
    # tokens: the number of new tokens, reduced to the room of the model
    # prompts: tokens to begin with and their mask; by default random tokens
    text = model.config.get_text_config(decoder=True)
    room = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None) or 512
    new_tokens = min(tokens, room - 12)
    if prompts is not None:
        inputs, new_tokens = dict(prompts), tokens
    elif input_name(model) != "input_ids" and getattr(model.config, "is_encoder_decoder", False):
        inputs = {input_name(model): encoder_input(model, rows, 3200)}
    else:
        ids = torch.randint(3, text.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
        for name in ("image_token_id", "image_token_index"):
            token = getattr(model.config, name, None)
            if token is not None:
                ids[ids == token] = token + 1
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        mask[2:, :1] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
    if task == "image-text-to-text":
        inputs.update(with_pictures(model, inputs))
    generate = model.generate
    if model.main_input_name == "input_features":
        # Whisper's own `generate` detects the language first, and returns no start token
        import transformers

        generate = functools.partial(transformers.GenerationMixin.generate, model)
    with undisturbed(model=model), in_one_thread(model):
        asked = {"max_new_tokens": new_tokens, "do_sample": False, "return_dict_in_generate": True}
        found = generate(**inputs, **asked, output_scores=True, **plain_loop(model))
    for name in ("mm_token_type_ids", "token_type_ids"):  # the generator of the files computes these inputs
        inputs.pop(name, None)
    margins = torch.full(found.sequences.shape, torch.inf)
    best, next_best = torch.stack(found.scores, 1).float().topk(2).values.unbind(-1)
    margins[:, -len(found.scores) :] = best - next_best
    return StoredCase(inputs, {"sequences": found.sequences, "new_tokens": new_tokens, "margins": margins})


def store_piece(
    piece: Piece,
    cases: Sequence[Case],
    tokens: torch.Tensor | None,
    work: pathlib.Path,
    below: str = CASES,
    runs: EagerRuns | None = None,
) -> list[str]:
    """Store the test cases of one exported file, and the losses of the model on a text; return the paths."""
    # runs: outputs that the module already computed for the proof of its file
    (work / below).mkdir(parents=True, exist_ok=True)
    names = []
    for number, case in enumerate((Case("the example", (), piece.kwargs), *cases)):
        opened = register_flattening_functions(patch_transformers=True)
        with opened, torch.no_grad(), undisturbed(module=piece.module, kwargs=case.kwargs):
            kwargs = clone(dict(case.kwargs))
            inputs = dict(zip(leaf_names(kwargs), pytree.tree_leaves(kwargs), strict=True))
            known = None if runs is None else runs.first(case.kwargs)
            outputs = piece.module(**case.kwargs) if known is None else known.outputs
            leaves = pytree.tree_leaves(clone(outputs))
            results = dict(zip(output_names(outputs, inputs), leaves, strict=True))
        names.append(store(StoredCase(inputs, results), work, f"{below}/{piece.stem}-{number}.case", case.name))
    if tokens is None:
        return names
    # the losses of a text are stored, because logits would take more space than the model
    texts = runs.texts if runs else ()
    with register_flattening_functions(patch_transformers=True):
        for number, (given, text, losses, _) in enumerate(texts or read_by_model(piece.module, piece.kwargs, tokens)):
            inputs = dict(zip(leaf_names(given), pytree.tree_leaves(given), strict=True))
            read = StoredCase(inputs, {**losses, "text": text})
            names.append(store(read, work, f"{below}/{piece.stem}-text-{number}.case", f"text {number}"))
    return names


def store_generation(
    model: TransformersModel,
    task: str,
    batch: int | None,
    tokens: int,
    work: pathlib.Path,
    after: int = 0,  # number of tokens of the prompt; `PROMPT` tokens if 0
    below: str = CASES,
) -> str:
    """Store a test case: the tokens that a model generates from a prompt. Return the path of the file."""
    case = generation_case(model, task, batch or 3, tokens, after or PROMPT)
    text = f"{case.outputs['new_tokens']} tokens, greedily{f', after {after}' if after else ''}"
    return store(case, work, f"{below}/generate{f'-{after}' if after else ''}.case", text)


def store(case: StoredCase, work: pathlib.Path, path: str, name: str) -> str:
    # the suffix of the path is not .onnx, because tools search folders for models with this suffix
    inputs, outputs = ({n: leaf for n, leaf in one.items() if leaf is not None} for one in (case.inputs, case.outputs))
    save_case(work / path, inputs, outputs, name=name)
    return path
