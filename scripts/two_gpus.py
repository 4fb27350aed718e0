"""The proof on two GPUs: divided runs equal one GPU, Megatron's engine trains, checkpoints change their division.

    python scripts/two_gpus.py [--out results.json] [--only layers,time,train] [--one-gpu]

Writes every number as JSON and prints the checks; exits with 1 when one fails. With --one-gpu both processes share a
GPU, which needs NCCL 2.30 or newer (it may be preloaded); one process alone is timed there.

S tokens, B batch, H index heads, D index dim.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_GPU = "--on-first-gpu"
STEPS, SAVED, RESUMED = 50, 40, 44
SEQUENCE, TIMED_SEQUENCE = 8192, 32768
COMPARED_SEQUENCE, VOCABULARY, HIDDEN = 4096, 1024, 1024
SMALL = dict(n_heads=16, head_dim=256, q_lora_rank=512, o_groups=4, o_lora_rank=256)
COMMAND = (
    "--config-name", "pretrain_v4_4layer_megatron", f"data.sequence_length={SEQUENCE}", "train.batch_size=1",
    f"train.steps={STEPS}", "train.lr_warmup_steps=5", "train.eval_batches=0", f"train.checkpoint_interval={SAVED}",
    "train.log_interval=1", "indexer.backend=tilelang", "indexer.loss.warmup_steps=10", "indexer.loss.coeff=1.0",
    "megatron.num_workers=0",
)  # fmt: skip


def settings(backend):
    """Indexer of the compared model: a layer of every kind, V4-Flash's index heads."""
    from nemo_v4_indexer.config import IndexerConfig

    loss = dict(coeff=1.0)
    return IndexerConfig.from_dict(dict(num_layers=3, compress_ratio=[0, 4, 128], topk=256, backend=backend, loss=loss))


def gradients(backend, dtype, tensor=1, context=1):
    """Loss and whole gradients by name of one step of the compared model, on every rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from nemo_v4_indexer.config import AttentionConfig
    from nemo_v4_indexer.integrations import megatron as host
    from nemo_v4_indexer.training.cpu_host import megatron_on

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, context_parallel_size=context)
    with megatron_on(torch.device("cuda")):
        model = host.build_gpt_model(
            dict(hidden_size=HIDDEN, num_layers=3, ffn_hidden_size=2048),
            AttentionConfig(**SMALL),
            settings(backend),
            vocab_size=VOCABULARY,
            sequence_length=COMPARED_SEQUENCE,
            tensor_parallel=tensor,
            sequence_parallel=tensor > 1,
            context_parallel=context,
            seed=1,
        )
        model = model.cuda().to(dtype)
        tokens = torch.randint(0, VOCABULARY, (1, COMPARED_SEQUENCE + 1), generator=torch.Generator().manual_seed(2))
        batch = dict(
            tokens=tokens[:, :-1].cuda(),
            labels=tokens[:, 1:].cuda(),
            position_ids=torch.arange(COMPARED_SEQUENCE, device="cuda")[None],
        )
        group = parallel_state.get_context_parallel_group()
        if context > 1:
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        model.config.experimental_attention_variant_loss_scale_func(torch.tensor(float(context), device="cuda"))
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).float().mean()
        loss.backward()
        host.finalize_gradients(model)
        found = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.float()
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=group)
            found[name] = whole(name, gradient, parameter, tensor).cpu()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=group)
    parallel_state.destroy_model_parallel()
    torch.cuda.empty_cache()
    return loss.item(), found


def whole(name, gradient, parameter, ranks):
    """A divided parameter's gradient as one process has it."""
    import torch
    import torch.distributed as dist

    if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(ranks)]
    dist.all_gather(parts, gradient.contiguous())
    if "linear_fc1" in name:  # each rank holds [gate; up] of its columns
        parts = [half for part in zip(*(p.chunk(2) for p in parts), strict=True) for half in part]
    return torch.cat(parts, parameter.partition_dim)


def error(actual, expected, indexer):
    """Relative error over all gradients of the indexers, or of everything else."""
    names = [name for name in expected if (".indexer." in name) == indexer]
    off = sum((actual[n] - expected[n]).double().square().sum() for n in names)
    return (off / sum(expected[n].double().square().sum() for n in names)).sqrt().item()


def compare_layers():
    """Facts on bf16 gradients: of one GPU, TP2 + SP and CP2, against the fp32 reference on one GPU."""
    import torch

    _, exact = gradients("reference", torch.float32)
    facts = {}
    for label, layout in {"one GPU": {}, "TP2+SP": {"tensor": 2}, "CP2": {"context": 2}}.items():
        loss, found = gradients("tilelang", torch.bfloat16, **layout)
        facts[label] = {"loss": loss, "indexer": error(found, exact, True), "main": error(found, exact, False)}
    return facts


def time_indexer(ranks):
    """Milliseconds of a V4-Flash indexer's selection and of its forward and backward, at S = 32768 over `ranks`."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_v4_indexer.config import AttentionConfig, IndexerConfig
    from nemo_v4_indexer.integrations.megatron import V4TransformerConfig
    from nemo_v4_indexer.layer import V4Indexer
    from nemo_v4_indexer.ops.loss import indexer_kl_loss

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    indexer = IndexerConfig(num_layers=1, compress_ratio=4, topk=512, backend="tilelang")
    attention = AttentionConfig(n_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024)
    config = V4TransformerConfig(
        v4_indexer=indexer,
        v4_attention=attention,
        num_layers=1,
        hidden_size=4096,
        num_attention_heads=64,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        gradient_accumulation_fusion=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = V4Indexer(config, None, 1, layer=indexer.layer(1), q_lora_rank=1024, pg_collection=groups)
    layer = layer.cuda().bfloat16()
    rows = TIMED_SEQUENCE // ranks
    x = torch.randn(rows, 1, 4096, device="cuda", dtype=torch.bfloat16)
    qr = torch.randn(rows, 1, 1024, device="cuda", dtype=torch.bfloat16)

    def select():
        with torch.no_grad():
            layer(x, qr)

    def train():
        selection = layer(x, qr)
        mass = torch.rand_like(selection.scores)
        how = dict(rows=TIMED_SEQUENCE, backend="tilelang")
        loss, _ = indexer_kl_loss(selection.scores, selection.own_indices, mass, **how)
        loss.backward()

    times = {"selection": median_ms(select), "training": median_ms(train)}
    parallel_state.destroy_model_parallel()
    return times


def time_exchange():
    """Milliseconds in which the ranks exchange halves of bf16 rows, by bytes that each one sends."""
    import torch
    import torch.distributed as dist

    from nemo_v4_indexer.parallel import exchange_rows

    times = {}
    for rows in (2**10, 2**17):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        halves = [rows // 2] * 2
        times[x.nbytes // 2] = median_ms(lambda x=x, halves=halves: exchange_rows(x, halves, halves, dist.group.WORLD))
    return times


def machine():
    """What the numbers were measured on and with."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torch", "tilelang", "megatron-core")}
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": versions | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "command": " ".join(["python", "scripts/two_gpus.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


def median_ms(action, repeats=9):
    """Median over repeats of the slower rank's time."""
    import torch
    import torch.distributed as dist

    times = []
    for repeat in range(repeats + 3):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        spent = torch.tensor(time.perf_counter() - start, device="cuda")
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if repeat >= 3:
            times.append(1e3 * spent.item())
    return sorted(times)[len(times) // 2]


def worker(parts, out):
    """Both ranks: the parts that need no engine."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    facts = {}
    if "layers" in parts:
        facts["layers"] = compare_layers()
    if "time" in parts:
        facts["time"] = {f"TP{ranks}": time_indexer(ranks) for ranks in range(1, dist.get_world_size() + 1)}
        facts["exchange"] = time_exchange() if dist.get_world_size() > 1 else {}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(facts))
    dist.destroy_process_group()


def torchrun(processes, one_gpu, *arguments):
    """Run ranks to their end; says how long they took, and what they said last where they failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = dict(os.environ)
    if one_gpu:
        command += [__file__, FIRST_GPU]
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run([*command, *arguments], env=environment, stdout=output, stderr=output).returncode
        finally:  # also when this program is told to stop
            print(f"{time.monotonic() - started:6.1f} s  {processes} ranks of {' '.join(arguments[:2])}", flush=True)
            output.seek(0)
            said = output.read()[-6000:]
    if code:
        print(said, file=sys.stderr)
        raise SystemExit(f"failed: torchrun {' '.join(arguments[:3])} ...")


def records(folder):
    return {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def train_and_resume(folder, one_gpu):
    """Losses of TP2 + SP on Megatron's engine, and of one GPU that goes on from its checkpoint."""
    run = ("-m", "nemo_v4_indexer.pretrain", *COMMAND)
    torchrun(2, one_gpu, *run, f"output_dir={folder / 'tp2'}")
    both = records(folder / "tp2")
    shutil.rmtree(folder / "tp2" / "checkpoints" / f"iter_{STEPS:07d}")
    (folder / "tp2" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    one = ("parallel.tensor=1", "parallel.sequence=false", "train.resume=true", f"megatron.exit_interval={RESUMED}")
    torchrun(1, one_gpu, *run, *one, f"output_dir={folder / 'tp2'}")
    resumed = records(folder / "tp2")
    speeds = sorted(both[step]["tokens_per_s"] for step in range(11, STEPS + 1))
    names = ("lm_loss", "indexer_loss", "kl_uniform", "recall", "recall_random", "grad_norm")
    return {
        "first": {name: both[1].get(name) for name in names},
        "last": {name: both[STEPS].get(name) for name in names},
        "tokens_per_s": speeds[len(speeds) // 2],
        "resumed": [
            {name: (both[step][name], resumed[step][name]) for name in ("lm_loss", "indexer_loss")}
            for step in range(SAVED + 1, RESUMED + 1)
        ],
    }


def checks(facts):
    """(what, measured, bound, fine) of every check."""
    rows = []
    if layers := facts.get("layers"):
        one = layers.pop("one GPU")
        for label, found in layers.items():
            rows.append((f"{label}: loss - one GPU's", abs(found["loss"] - one["loss"]), 2e-3))
            for part in ("main", "indexer"):  # as far from the fp32 reference as one GPU in bf16 is
                rows.append((f"{label}: {part} gradient error", found[part], 1.5 * one[part] + 1e-3))
        layers["one GPU"] = one
    if "TP2" in (times := facts.get("time", {})):
        for name in ("selection", "training"):
            ratio = times["TP2"][name] / times["TP1"][name]
            rows.append((f"indexer {name}, S={TIMED_SEQUENCE}: TP2 / TP1 time", ratio, 0.65))
    if run := facts.get("train"):
        last, first = run["last"]["lm_loss"], run["first"]["lm_loss"]
        rows.append((f"loss after {STEPS} steps / first", last / first, 0.8))
        worst = max(abs(a - b) / a for step in run["resumed"] for a, b in [step["lm_loss"]])
        rows.append(("TP2 checkpoint on one GPU: relative loss difference", worst, 1e-2))
    return [(*row, row[1] <= row[2]) for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("two_gpus.json"))
    parser.add_argument("--only", default="layers,time,train", help="parts to run (%(default)s)")
    parser.add_argument("--one-gpu", action="store_true", help="both processes on the first GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if arguments.worker:
        return worker(parts, arguments.worker)
    # Memory, where there is some: a checkpoint is 10 GB.
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else ".") / f"two_gpus_{os.getpid()}"
    folder.mkdir()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # what was measured until then is written
    facts, rows = {"machine": machine()}, []
    try:
        part = folder / "facts.json"
        for name in [name for name in ("layers", "time") if name in parts]:
            ranks = 1 if arguments.one_gpu and name == "time" else 2
            torchrun(ranks, arguments.one_gpu, __file__, "--only", name, "--worker", str(part))
            facts |= json.loads(part.read_text())
        if "train" in parts:
            facts["train"] = train_and_resume(folder, arguments.one_gpu)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        rows = checks(facts)
        arguments.out.write_text(json.dumps(facts | {"checks": rows}, indent=1))
        for what, measured, bound, fine in rows:
            print(f"{'ok  ' if fine else 'FAIL'}  {what:<58} {measured:.4g}  (at most {bound:.4g})")
    return int(not all(row[3] for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == [FIRST_GPU]:  # a rank that torchrun meant for a GPU of its own
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    sys.exit(main())
