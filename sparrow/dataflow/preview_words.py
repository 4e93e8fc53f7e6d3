"""What a configuration says, as sentences of a preview."""

from sparrow.schema.train import AlgorithmConfig, Choice, GateConfig, RowsConfig
from sparrow.train.objectives.algorithms import PRESETS


def rows_words(data: RowsConfig) -> str:
    """Where rows come from, and who judges them."""
    if data.file is not None:
        judge = data.reward or "its data_source"
        return f"{data.file}, judged by {judge}{', shuffled' if data.shuffle else ''}"
    number = "without end" if data.rows is None else f"{data.rows} rows"
    return f"{data.task}, length {data.length}, from row {data.first} on, {number}"


def algorithm_words(algorithm: AlgorithmConfig) -> str:
    """The objective, by the names of its parts."""
    preset = PRESETS[algorithm.name]
    surrogate = _choice_words(algorithm.surrogate or preset.surrogate)
    corrections = ", ".join(map(_choice_words, algorithm.corrections)) or "none"
    parts = f"{algorithm.name}; surrogate {surrogate}; corrections: {corrections}"
    usual = preset.aggregate if algorithm.surrogate is None else "aggregate of the surrogate"
    return f"{parts}; {algorithm.aggregate or usual}"


def _choice_words(choice: Choice) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in choice.settings.items())
    return f"{choice.use} ({settings})" if settings else choice.use


def gate_words(gate: GateConfig, *, sparse: bool) -> str:
    """What is done about the tail, as a sentence."""
    if gate.mode == "off":
        return "off"
    bins = "the schedule's bins" if sparse else "eighths of the longest sequence"
    if gate.bin is not None:
        bins = f"bins of {gate.bin} tokens"
    looks = (
        f"p05 of acceptance by {bins}, exact on {gate.sample} answers a step, over {gate.window} "
        f"steps; target {gate.target:g}"
    )
    if gate.mode == "warn":
        return f"{looks}; below it: a warning"
    surely = f"below it at {gate.patience} looks in a row, or surely"
    if not sparse:
        return f"{looks}; surely below it: the run stops, as rollout is dense already"
    raised = f"its budget is raised by {gate.factor:g}, up to {gate.raises} times, then "
    lower = f"; budgets fall where p05 is surely {gate.slack:g} above it" if gate.lower else ""
    act = f"{raised if gate.raises else ''}it runs dense, then the run stops"
    return f"{looks}; {surely}: {act}{lower}"
