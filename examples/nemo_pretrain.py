"""Pretrain with the indexer as a NeMo application (nemo-toolkit 3.0.0), on a CPU:

    python examples/nemo_pretrain.py                                                  with the indexer
    python examples/nemo_pretrain.py model.v4_indexer=null                            full attention instead
    python examples/nemo_pretrain.py +model.v4_indexer.layers.4.topk=8                one layer, counted from 1
    python examples/nemo_pretrain.py exp_manager.resume_if_exists=true trainer.max_steps=200
    python examples/nemo_pretrain.py --config-name gpt_tiny +nemo_v4_indexer=tiny     on a config without it

`--config-path FOLDER --config-name NAME` takes a configuration of your own; `--cfg job` prints it and stops.
"""

from nemo.core.config import hydra_runner

from nemo_v4_indexer.integrations.nemo import pretrain


@hydra_runner(config_path="../nemo_v4_indexer/configs/nemo", config_name="v4_tiny")
def main(cfg):
    print("finished; metrics.jsonl, checkpoints and logs are in", pretrain(cfg))


if __name__ == "__main__":
    main()
