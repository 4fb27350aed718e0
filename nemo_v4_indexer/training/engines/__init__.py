"""The loops that can run a training configuration, and which of them does."""

from collections.abc import Callable

from nemo_v4_indexer.training.config import BYTE_SOURCES, PretrainConfig
from nemo_v4_indexer.training.errors import UsageError


def choose(config: PretrainConfig) -> Callable[..., int]:
    """The engine's `run(config, resolved, resolved_yaml)`. Raises UsageError for what only the other engine can do."""
    from nemo_v4_indexer.training import world

    if config.engine != "embedded":
        world.order_kernels()  # before anything touches the GPU
    device = world.device_of(config.device, world.launch())
    engine = config.engine
    if engine == "auto":
        engine = "megatron" if device.type == "cuda" else "embedded"
    if engine == "megatron":
        if device.type != "cuda":
            raise UsageError("engine=megatron needs a GPU per rank; engine=embedded trains without one")
        from nemo_v4_indexer.training.engines import megatron

        return megatron.run
    for key, unusual in {
        f"data={config.data.source}": config.data.source not in BYTE_SOURCES,
        f"parallel.context={config.parallel.context}": config.parallel.context > 1,
        f"parallel.pipeline={config.parallel.pipeline}": config.parallel.pipeline > 1,
    }.items():
        if unusual:
            raise UsageError(f"{key} needs the Megatron engine on GPUs; this run uses engine=embedded")
    from nemo_v4_indexer.training.engines import embedded

    return embedded.run
