"""Turn the indexer on in a NeMo configuration of your own and see what every layer becomes. Needs no NeMo.

    python examples/nemo_config.py
    python examples/nemo_config.py model.v4_indexer.topk=64 +model.v4_indexer.layers.4.topk=16

The two lines that do it work on the command line of any application with `@hydra_runner` or `@hydra.main`:
    'hydra.searchpath=[pkg://nemo_v4_indexer.configs]' +nemo_v4_indexer=v4_flash
"""

import sys
import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir

from nemo_v4_indexer import IndexerConfig

OWN = """\
name: my_model
trainer: {devices: 8, max_steps: 1000}
exp_manager: {exp_dir: results}
model: {hidden_size: 4096, num_layers: 7}
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "my_model.yaml").write_text(OWN)
        with initialize_config_dir(folder, version_base=None):
            turn_on = ["hydra.searchpath=[pkg://nemo_v4_indexer.configs]", "+nemo_v4_indexer=v4_flash"]
            config = compose("my_model", overrides=[*turn_on, *sys.argv[1:]])
    indexer = IndexerConfig.from_dict(config.model.v4_indexer)  # names the key of every mistake
    for layer in indexer.plan():
        print(f"layer {layer.layer_number}: {layer.kind}, ratio {layer.compress_ratio}, topk {layer.topk}")
    for warning in indexer.warnings_for(seq_length=4096):
        print("warning:", warning)


if __name__ == "__main__":
    main()
