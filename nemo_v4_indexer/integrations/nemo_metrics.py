"""metrics.jsonl and the resolved configuration in the folder that NeMo's exp_manager chose."""

import shutil
from pathlib import Path

from lightning.pytorch import Callback
from omegaconf import OmegaConf

from nemo_v4_indexer.training.files import write_text
from nemo_v4_indexer.training.metrics import MetricsFile


class MetricsJsonl(Callback):
    """Writes a line per optimizer step and one per validation, and goes on with the file when a run is resumed.

    Args:
        folder: exp_manager's log folder.
        config: the whole configuration, saved beside the checkpoints.
    """

    def __init__(self, folder, config):
        self.folder, self.config = Path(folder), config
        self.file = None

    def on_train_start(self, trainer, module):
        if not trainer.is_global_zero:
            return
        callback = trainer.checkpoint_callback
        places = [self.folder, *([Path(callback.dirpath)] if callback is not None else [])]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
            write_text(place / "config.yaml", OmegaConf.to_yaml(self.config, resolve=True))
        path = self.folder / "metrics.jsonl"
        if trainer.global_step and (earlier := self._earlier()):
            shutil.copy(earlier, path)
        self.file = MetricsFile(path, trainer.global_step)

    def _earlier(self):
        """The file of the run before this one, which exp_manager moved away."""
        found = [path for path in self.folder.glob("run_*/metrics.jsonl") if path.parent.name[4:].isdigit()]
        return max(found, key=lambda path: int(path.parent.name[4:]), default=None)

    def write(self, record):
        """One record; nothing on other ranks than the first."""
        if self.file:
            self.file.append(record)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if self.file:
            self.file.sync()  # a checkpoint never runs ahead of the metrics

    def teardown(self, trainer, module, stage):
        if self.file:
            self.file.close()
            self.file = None
