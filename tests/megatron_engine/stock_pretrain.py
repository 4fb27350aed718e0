"""A training script as users of Megatron have it, over gloo with a faked CUDA. What it has of this package are the two
lines that the documentation offers: the indexer's numbers, and the repairs.

    [torchrun ...] stock_pretrain.py builder|provider [--repaired] OPTIONS OF MEGATRON

builder: Megatron's own model builder makes the model. provider: a function as older scripts have it.
"""

import contextlib
import json
import sys
from functools import partial
from unittest import mock

import torch
from fake_cuda import OnCpu, fake_cuda


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config,
        import_module(args.spec)(config, vp_stage=vp_stage),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


class Windows(torch.utils.data.Dataset):
    """A text over and over, each sample from another place of it."""

    def __init__(self, length, count):
        self.length, self.count = length, count
        self.text = torch.arange(4096) ** 2 % 97

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        start = 41 * number % (len(self.text) - self.length)
        window = self.text[start : start + self.length + 1]
        whole = {"loss_mask": torch.ones(self.length), "position_ids": torch.arange(self.length)}
        return {"tokens": window[:-1], "labels": window[1:], **whole}


def datasets(samples, vp_stage=None):
    from megatron.training import get_args

    return tuple(Windows(get_args().seq_length, count) if count else None for count in samples)


datasets.is_distributed = True  # every rank has them


def forward_step(iterator, model):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(next(iterator), is_hybrid_cp=False, cp_group=group)
    mask = batch["loss_mask"]
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=mask)
    return output, partial(loss, mask)


def loss(mask, output):
    total, count = (output.float() * mask).sum(), mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


def main(how, *options):
    fake_cuda()
    from megatron.core.datasets import utils
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, print_rank_last, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from nemo_v4_indexer.integrations.megatron import indexer_metrics
    from nemo_v4_indexer.training.compat import repaired_megatron

    repairs = repaired_megatron() if "--repaired" in options else contextlib.nullcontext()
    sys.argv[1:] = [option for option in options if option != "--repaired"]
    # The Makefile that this would run is in Megatron's repository, not in its wheel.
    compiled = mock.patch.object(utils, "compile_helpers", lambda: None)
    # Its warm-up draws from CUDA's generator, which here is the one that draws the weights.
    cold = mock.patch.object(training, "set_jit_fusion_options", lambda **_: None)
    with OnCpu(), compiled, cold, repairs:
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        built = how == "builder"
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args) if built else None),
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=None if built else model_provider,
            non_loss_data_func=lambda model: print_rank_last(f"indexer {json.dumps(indexer_metrics(model))}"),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
