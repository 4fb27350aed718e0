"""Tables and plot of a benchmark record, the JSON that bench.py writes. Needs no GPU and no torch."""

OPERATIONS = ("forward", "scores", "top-k", "backward", "forward+backward")
OWN = "this package"
TITLES = {
    "forward": "Forward: scores and top-k",
    "scores": "Scores alone",
    "top-k": "Top-k alone",
    "backward": "Backward",
    "forward+backward": "Forward and backward",
}
# Operation, peer, lengths and least ratio; all at ratio 4, K = 512, one sequence, iid data.
TARGETS = (
    ("forward", "NeMo AutoModel", (32768, None), 3.0),
    ("forward", "NeMo AutoModel", (None, 8192), 4.0),
    ("forward", "cuDNN frontend", (None, None), 1.25),
    ("top-k", "cuDNN frontend", (None, None), 2.0),
    ("top-k", "torch", (None, None), 10.0),
    ("backward", "NeMo AutoModel", (None, None), 4.5),
    ("backward", "cuDNN frontend", (None, None), 1.4),
    ("forward+backward", "NeMo AutoModel", (None, None), 3.5),
)
SCORES_OF_FLOOR = 0.75  # from 32768 rows on
TOPK_OF_FORWARD = 0.10
LONG = 32768
MEMORY_MIB = 1024  # forward and backward together at 131072 rows
COLOURS = {
    OWN: "tab:red",
    "NeMo AutoModel": "tab:blue",
    "megatron-core": "tab:green",
    "cuDNN frontend": "tab:purple",
    "cuDNN frontend, deterministic": "tab:pink",
    "torch": "tab:brown",
    "torch, unsorted": "tab:olive",
}


def row_of(shape, operation, arm):
    """The row of an arm in a shape's record, or an empty one."""
    return next((r for r in shape["arms"] if (r["operation"], r["arm"]) == (operation, arm)), {})


def arms_of(record, operation):
    """Names of the arms that have the operation, this package first."""
    names = dict.fromkeys(r["arm"] for shape in record["shapes"] for r in shape["arms"] if r["operation"] == operation)
    return sorted(names, key=lambda name: name != OWN)


def _table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _number(value):
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(record, operation):
    """One operation as a Markdown table: ms, share of the floor, and how many times longer each peer takes."""
    arms = arms_of(record, operation)
    rows = []
    for shape in record["shapes"]:
        own, floor = row_of(shape, operation, OWN).get("ms"), shape["floors_ms"][operation]
        cells = [shape["label"], _number(floor)]
        cells += [f"{_number(own)} ({floor / own:.0%})" if own else _reason(row_of(shape, operation, OWN))]
        for arm in arms[1:] if OWN in arms else arms:
            row = row_of(shape, operation, arm)
            ratio = f" ({row['ms'] / own:.1f}x)" if own and "ms" in row else ""
            cells.append(f"{_number(row['ms'])}{ratio}" if "ms" in row else _reason(row))
        rows.append(cells)
    peers = [arm for arm in arms if arm != OWN]
    return _table(["ms", "floor", f"{OWN} (of floor)", *peers], rows)


def _reason(row):
    return "wrong" if "failed" in row else row.get("skipped", "-")


def memory(record):
    """Extra memory in MiB, beyond inputs, outputs and gradients."""
    arms = [arm for arm in arms_of(record, "forward+backward")]
    rows = []
    for shape in record["shapes"]:
        cells = [shape["label"]]
        for arm in arms:
            found = [row_of(shape, operation, arm).get("extra_mib") for operation in ("forward", "backward")]
            found.append(row_of(shape, "forward+backward", arm).get("extra_mib"))
            cells.append(" / ".join("-" if mib is None else f"{mib:.0f}" for mib in found))
        rows.append(cells)
    return _table(["MiB: forward / backward / both", *arms], rows)


def _typical(record):
    """Shapes of the targets and of the plot."""
    kind = {"ratio": 4, "topk": 512, "batch": 1, "data": "iid"}
    shapes = [s for s in record["shapes"] if all(s[key] == value for key, value in kind.items())]
    return sorted((s for s in shapes if s["sequence"] % 1024 == 0), key=lambda s: s["sequence"])


def targets(record):
    """(met, sentence) of every target that the record can judge."""
    found = []
    for operation, peer, (low, high), least in TARGETS:
        for shape in _typical(record):
            s, own = shape["sequence"], row_of(shape, operation, OWN).get("ms")
            other = row_of(shape, operation, peer).get("ms")
            if own and other and (low or 0) <= s <= (high or s):
                found.append((other / own >= least, f"S={s} {operation}: {other / own:.2f}x {peer}, target {least}x"))
    for shape in _typical(record):
        s, forward = shape["sequence"], row_of(shape, "forward", OWN).get("ms")
        scores, topk = (row_of(shape, operation, OWN).get("ms") for operation in ("scores", "top-k"))
        if scores and s >= LONG:
            share = shape["floors_ms"]["scores"] / scores
            found.append((share >= SCORES_OF_FLOOR, f"S={s} scores: {share:.0%} of the matrix rate, target 75%"))
        if topk and forward:
            share = topk / forward
            found.append((share <= TOPK_OF_FORWARD, f"S={s} top-k: {share:.0%} of forward, target at most 10%"))
        mib = row_of(shape, "forward+backward", OWN).get("extra_mib")
        if s == 131072 and mib is not None:
            found.append((mib <= MEMORY_MIB, f"S={s} memory: {mib:.0f} MiB, target at most {MEMORY_MIB}"))
    return found


def report(record):
    """Everything as Markdown."""
    machine, ceilings = record["machine"], record["ceilings"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
    parts = [
        f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}; {versions}. {record['date']}, "
        f"revision {(record['revision'] or 'unknown')[:12]}, `{record['command']}`. Measured in the same run: bf16 "
        f"matrix product {ceilings['matmul_tflops']:.0f} TFLOP/s, copy {ceilings['copy_tbps']:.2f} TB/s."
    ]
    for operation in OPERATIONS:
        if arms_of(record, operation):
            parts += [f"**{TITLES[operation]}**", times(record, operation)]
    if arms_of(record, "forward+backward"):
        parts += ["**Extra memory**", memory(record)]
    rows = [(shape["label"], row) for shape in record["shapes"] for row in shape["arms"]]
    spreads = [max(row["medians_ms"]) / min(row["medians_ms"]) - 1 for _, row in rows if "ms" in row]
    notes = [f"The two series' medians differ by at most {max(spreads):.1%}."] if spreads else []
    notes += [f"{arm} did not run: {reason}." for arm, reason in record["missing"].items()]
    notes += [f"{label}: failed: {s['failed']}." for s in record["shapes"] if "failed" in s for label in [s["label"]]]
    notes += [f"{label} {r['operation']}: {r['arm']} failed: {r['failed']}." for label, r in rows if "failed" in r]
    notes += [] if record["finished"] else ["The run did not finish."]
    notes += [f"{'met' if met else 'MISSED'}: {sentence}" for met, sentence in targets(record)]
    return "\n\n".join(parts + (["\n".join(f"- {note}" for note in notes)] if notes else []))


def draw(record, path):
    """Time of every operation, and extra memory, against S; log-log, ratio 4, K = 512, one sequence."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = _typical(record)
    with matplotlib.rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
        figure = Figure(figsize=(14, 8.4), layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 3).flat
        for operation in OPERATIONS:
            axes = next(panels)
            _lines(axes, record, shapes, operation, "ms")
            _finish(axes, shapes, TITLES[operation], "ms")
        axes = next(panels)
        _lines(axes, record, shapes, "forward+backward", "extra_mib")
        _finish(axes, shapes, "Memory beyond inputs, outputs and gradients", "MiB")
        size = "".join(f", H={shape['heads']} D={shape['dim']}" for shape in shapes[:1])
        figure.suptitle(f"{record['machine']['device']}{size}, ratio 4, K=512, one sequence", fontsize=12)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _lines(axes, record, shapes, operation, key):
    for arm in arms_of(record, operation):
        points = [(s["sequence"], row_of(s, operation, arm).get(key)) for s in shapes]
        points = [(s, value) for s, value in points if value]
        if points:
            style = {"color": COLOURS.get(arm), "lw": 2.2 if arm == OWN else 1.4, "marker": "o", "markersize": 4}
            axes.loglog(*zip(*points, strict=True), label=arm, **style)
    if key == "ms" and shapes:
        floors = [(s["sequence"], s["floors_ms"][operation]) for s in shapes]
        axes.loglog(*zip(*floors, strict=True), color="black", ls="--", lw=1, label="floor")


def _finish(axes, shapes, title, unit):
    lengths = [shape["sequence"] for shape in shapes]
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.set_xlabel("query rows S")
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
