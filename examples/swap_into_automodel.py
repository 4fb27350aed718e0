"""Train NeMo AutoModel's DeepSeek-V4 with this package's indexer, on a CPU: python examples/swap_into_automodel.py

AutoModel's recipe needs a GPU (there: NEMO_ENABLE_USER_MODULES=1 automodel v4_tiny.yaml). This runs the same file with
AutoModel's own config loader, model, infrastructure, data and optimizer, and a loop in place of the recipe.
"""

import argparse
import logging
import random
from pathlib import Path

import torch
from nemo_automodel._transformers.infrastructure import apply_model_infrastructure
from nemo_automodel.components.config import loader
from nemo_automodel.recipes._typed_config import RecipeConfig

import nemo_v4_indexer

CONFIG = Path(nemo_v4_indexer.__file__).parent / "configs" / "automodel" / "v4_tiny.yaml"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, help="default: step_scheduler.max_steps")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    loader.set_enable_user_modules(True)  # as NEMO_ENABLE_USER_MODULES=1 does
    config = RecipeConfig(loader.load_yaml_config(args.config))
    random.seed(config.seed)
    torch.manual_seed(config.seed)

    model = config.model.instantiate()
    # Shards and loads on a cluster; here it only freezes the indexers, as it always does.
    model = apply_model_infrastructure(model, is_meta_device=False, device=torch.device("cpu"))
    (optimizer,) = config.optimizer.build(model)  # makes them trainable again
    data = config.dataloader.build(tokenizer=None, dp_rank=0, dp_world_size=1)
    loss_fn = config.loss_fn.build()

    model.train()
    for step, batch in zip(range(args.steps or config.step_scheduler.max_steps), data, strict=False):
        labels = batch.pop("labels")
        loss = loss_fn(model(**batch).logits, labels, num_label_tokens=int((labels >= 0).sum()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: lm_loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
