"""`python -m nemo_v4_indexer.plan`: what every layer's indexer will cost for a configuration and a parallel layout.

Takes the arguments of `python -m nemo_v4_indexer.pretrain`: --config-name and key=value overrides.
"""

import argparse
import sys

from nemo_v4_indexer import costs, visibility

MIB = costs.MIB


def share_of_rows(config, balanced):
    """Rows of every tensor and context parallel rank: `Layout`, or None where they do not divide evenly.

    balanced: even in work where that is possible, else consecutive.
    """
    tensor, context, sequence = config.parallel.tensor, config.parallel.context, config.data.sequence_length
    chunks = 2 * context if context > 1 else 1
    if sequence % chunks or (sequence // context) % tensor:
        return None
    rows = sequence // context
    queries = visibility.zigzag(sequence, context, 0)
    balanced = balanced and rows % (2 * tensor) == 0
    return queries.compose((visibility.zigzag if balanced else visibility.contiguous)(rows, tensor, 0), 0)


def warnings_for(config, plan, found):
    """Readable warnings about layouts that waste: list of str."""
    sequence, tensor = config.data.sequence_length, config.parallel.tensor
    warnings = config.indexer.warnings_for(sequence)
    for name in ("n_heads", "o_groups"):
        if getattr(config.attention, name) % tensor:
            value = getattr(config.attention, name)
            warnings.append(
                f"model.attention.{name} {value} does not divide over parallel.tensor {tensor}: this will not run"
            )
    if share_of_rows(config, False) is None and any(layer.has_indexer for layer in plan):
        warnings.append(f"{sequence} rows do not divide over the ranks: every rank scores the same rows")
    worst = max((cost.imbalance for cost in found), default=1.0)
    if worst > 1.2:
        warnings.append(
            f"the busiest rank scores {worst:.2f} times the mean: indexer.balance_rows=true evens it out "
            "(left null, a cost model decides at run time)"
        )
    return warnings


def report(config):
    """The plan as text."""
    plan = config.indexer.plan()
    parallel, sequence = config.parallel, config.data.sequence_length
    data_ranks = 1
    batch, _ = config.micro_batches(data_ranks)
    found = [
        costs.layer_cost(
            layer,
            config.attention,
            config.model,
            sequence=sequence,
            batch=batch,
            tensor=parallel.tensor,
            context=parallel.context,
            # As `V4Indexer` divides them, but for its cost model's choice: balanced when asked for by name.
            share=share_of_rows(config, layer.balance_rows),
            held=share_of_rows(config, layer.balance_rows and not parallel.sequence),
        )
        for layer in plan
    ]
    names = {"layer": 5, "kind": 7, "ratio": 5, "topk": 5, "pairs": 12, "GFLOP": 10, "share": 6, "gathered": 10}
    head = " ".join(f"{name:>{width}}" for name, width in (names | {"workspace": 10}).items())
    lines = [
        f"sequence {sequence}, {batch} per micro-batch, tensor {parallel.tensor}, context {parallel.context}; "
        "per rank, forward and backward of one micro-batch",
        head,
    ]
    for layer, cost in zip(plan, found, strict=True):
        number = f"{layer.layer_number}{'*' if layer.is_mtp else ''}"
        lines.append(f"{number:>5} {layer.kind:>7} {layer.compress_ratio:>5} " + _numbers(layer, cost))
    sums = costs.total(found)
    lines.append(
        f"indexer: {sums['indexer'] / 1e9:.3f} of {sums['layer'] / 1e9:.3f} GFLOP in all layers "
        f"({sums['indexer'] / sums['layer']:.1%}); gathered {sums['gathered'] / MIB:.2f} MiB"
    )
    if any(layer.is_mtp for layer in plan):
        lines.append("* multi-token-prediction layer")
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings_for(config, plan, found))])


def _numbers(layer, cost):
    if cost.memory is None:
        return f"{'-':>5} {'-':>12} {'-':>10} {'-':>6} {'-':>10} {'-':>10}"
    return (
        f"{layer.topk:>5} {cost.scored_pairs:>12} {cost.indexer / 1e9:>10.3f} {cost.indexer / cost.layer:>6.1%} "
        f"{cost.gathered / MIB:>6.2f} MiB {cost.memory.workspace / MIB:>6.1f} MiB"
    )


def main(argv=None):
    """Print the plan; returns the exit code, 2 for a usage error."""
    from omegaconf import OmegaConf

    from nemo_v4_indexer.training.cli import compose
    from nemo_v4_indexer.training.config import PretrainConfig
    from nemo_v4_indexer.training.errors import UsageError

    parser = argparse.ArgumentParser(prog="python -m nemo_v4_indexer.plan", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config-name", "-cn", default="pretrain_tiny")
    arguments = parser.parse_args(argv)
    try:
        composed = compose(arguments.config_name, arguments.overrides)
        print(report(PretrainConfig.from_dict(OmegaConf.to_container(composed, resolve=True))))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
