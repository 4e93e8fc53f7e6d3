"""The built-in proposer of flow campaigns: formulas as genes, drawn, changed and recombined.

A `Formula` is a choice for every gene: what is kept of a page, in which format, and how a page is
scored from it. All combinations are flows; `source` writes one as a Python file. Draws are
functions of a seed, so a campaign can be repeated.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, get_args

from sparrow.schema.base import Record

CHANGES = 0.3  # chance that a second gene changes too
CROSS = 0.4  # chance of two parents, where there are two
FRESH = 0.15  # chance of a formula without parents

NAMES = [*("as_keys", "fp16", "fp8", "int4"), "convolve_over_pages", "logsumexp"]
NAMES += ["softmax_over_pages", "union"]


class Formula(Record):
    """Genes of a flow."""

    tokens: Literal[2, 4, 8, 16] = 4  # of a landmark: the mean of so many keys
    form: Literal["int4", "fp8", "as_keys"] = "int4"  # in which landmarks are kept
    spread: Literal["none", "number", "channels"] = "none"  # of keys around their mean, and how
    spread_scale: Literal["0.25", "0.5", "0.75", "1"] = "0.5"  # of the second-order term
    value: Literal["none", "norm", "root"] = "none"  # mean norm of values, which weighs the page
    temperature: Literal["0.7", "1", "1.4", "2"] = "1"  # of logits
    pool: Literal["logsumexp", "max"] = "logsumexp"  # over the landmarks of a page
    over_pages: Literal["finished", "free", "none"] = "finished"  # softmax among these
    heads: Literal["sum", "max", "root"] = "sum"  # over query heads; root: sum of square roots
    neighbours: Literal["none", "light", "strong"] = "none"  # scores mixed with adjacent pages
    recency: Literal["none", "light", "strong"] = "none"  # late pages are worth more
    also: Literal["none", "max", "recent"] = "none"  # another choice joined: best head, latest
    also_share: Literal["0.125", "0.25", "0.5"] = "0.25"  # of the kept pages that are its
    layers: Literal[1, 2, 4] = 1  # sparse layers that use one choice

    def settled(self) -> "Formula":
        """Genes without effect at their defaults, so that equal flows are equal formulas."""
        changes: dict[str, object] = {}
        if self.spread == "none":
            changes["spread_scale"] = "0.5"
        if self.over_pages == "none":
            changes |= {"heads": "sum" if self.heads == "root" else self.heads}
        if self.also == "max" and self.heads == "max" and self.value == self.recency == "none":
            changes["also"] = "none"  # the same choice twice
        if "none" in (self.also, changes.get("also")):
            changes["also_share"] = "0.25"
        return self.replace(**changes) if changes else self

    def source(self, name: str) -> str:
        """The flow as a Python file."""
        fields, summary = _kept(self)
        body = _score(self)
        text = "\n".join([*summary, *body, *fields])
        more = [f"    layers={self.layers},"] if self.layers > 1 else []
        used = ["D", "Flow", "P", *(name for name in NAMES if f"{name}(" in text)]
        return "\n".join(
            [
                f'"""{name}: {self.model_dump_json()}"""',
                "",
                f"from sparrow.sparse.flows import {', '.join(used)}",
                "",
                "",
                "def summarise(keys, values):",
                *(f"    {line}" for line in summary),
                "",
                "",
                "def score(query, fields, position):",
                *(f"    {line}" for line in body),
                "",
                "",
                "flow = Flow(",
                f"    name={json.dumps(name)},",
                "    fields={" + ", ".join(fields) + "},",
                "    summarise=summarise,",
                "    score=score,",
                *more,
                ")",
                "",
            ]
        )


def _kept(formula: Formula) -> tuple[list[str], list[str]]:
    """The fields, and the lines that write them."""
    parts = f"P // {formula.tokens}"
    fields = [f'"means": {formula.form}({parts}, D)']
    lines = [
        f"parts = keys.reshape(keys.shape[0] // {formula.tokens}, {formula.tokens}, keys.shape[1])",
        "means = parts.mean(1)",
    ]
    written = ['"means": means']
    if formula.spread != "none":
        lines.append("away = parts - parts.mean(1, keepdims=True)")
    if formula.spread == "number":
        fields.append(f'"away": fp16({parts})')
        written.append('"away": (away * away).sum(2).mean(1) / keys.shape[1]')
    if formula.spread == "channels":
        fields.append(f'"away": {formula.form}({parts}, D)')
        written.append('"away": (away * away).mean(1).sqrt()')
    if formula.value != "none":
        fields.append('"value": fp16()')
        written.append('"value": values.norm(1).mean()')
    return fields, [*lines, f"return {{{', '.join(written)}}}"]


def _score(formula: Formula) -> list[str]:
    scale = f"{1 / float(formula.temperature):.4g} / query.shape[1] ** 0.5"
    lines = [f"logits = query @ fields.means.T * ({scale})  # [R, landmarks]"]
    if formula.spread == "number":
        lines += [
            "length = (query * query).sum(1, keepdims=True) / query.shape[1]",
            f"logits = logits + {formula.spread_scale} * length * fields.away",
        ]
    if formula.spread == "channels":
        lines += [
            "variance = (query * query) @ (fields.away * fields.away).T / query.shape[1]",
            f"logits = logits + {formula.spread_scale} * variance",
        ]
    pooled = "logsumexp(logits, axis=1)" if formula.pool == "logsumexp" else "logits.max(1)"
    lines.append(f"mass = {pooled}  # [R]")
    if formula.neighbours != "none":
        side = {"light": 0.1, "strong": 0.25}[formula.neighbours]
        kernel = f"({side}, {1 - 2 * side:g}, {side})"
        lines.append(f"mass = convolve_over_pages(mass, {kernel})")
    if formula.over_pages == "finished":
        lines.append("mass = softmax_over_pages(mass)")
    if formula.over_pages == "free":
        lines.append('mass = softmax_over_pages(mass, among="free")')
    heads = {"sum": "mass.sum()", "max": "mass.max()", "root": "mass.sqrt().sum()"}
    lines.append(f"worth = {heads[formula.heads]}")
    if formula.value != "none":
        weight = "fields.value" if formula.value == "norm" else "fields.value.sqrt()"
        # A logit may be below 0: a page of large values must not be worth less for it.
        lines.append(f"worth = worth + {weight}.log()" if _is_logit(formula) else "")
        lines[-1] = lines[-1] or f"worth = worth * {weight}"
    if formula.recency != "none":
        power = {"light": 0.1, "strong": 0.3}[formula.recency]
        late = "(position.page + 1) / (position.pages + 1)"
        lines.append(f"late = ({late}).log() * {power}")
        worth = "worth + late" if _is_logit(formula) else "worth * late.exp()"
        lines.append(f"worth = {worth}")
    if formula.also != "none":
        other = {"max": "mass.max()", "recent": "position.page"}[formula.also]
        lines.append(f"worth = union({other}, worth, {formula.also_share})")
    return [*lines, "return worth"]


def _is_logit(formula: Formula) -> bool:
    """Whether a page's worth is a logarithm of attention, not a share of it."""
    return formula.over_pages == "none"


# Draws.


def choices(gene: str) -> tuple[Any, ...]:
    return get_args(Formula.model_fields[gene].annotation)


def draw(rng: Random) -> Formula:
    """Any formula."""
    genes = {gene: rng.choice(choices(gene)) for gene in Formula.model_fields}
    return Formula(**genes).settled()


def mutate(formula: Formula, rng: Random) -> Formula:
    """Another value of one gene, or of two."""
    while True:
        count = 1 + (rng.random() < CHANGES)
        genes = rng.sample([*Formula.model_fields], count)
        changes = {
            gene: rng.choice([c for c in choices(gene) if c != getattr(formula, gene)])
            for gene in genes
        }
        changed = formula.replace(**changes).settled()
        if changed != formula:
            return changed


def recombine(one: Formula, other: Formula, rng: Random) -> Formula:
    """Each gene of either parent."""
    genes = {gene: getattr(rng.choice((one, other)), gene) for gene in Formula.model_fields}
    return Formula(**genes).settled()


def propose(parents: Sequence[Formula], rng: Random) -> tuple[Formula, tuple[int, ...], str]:
    """The next formula, the parents it is of (places, best first), and how it was made.

    Better parents are chosen more often.
    """
    if not parents or rng.random() < FRESH:
        return draw(rng), (), "drawn"
    first = _pick(len(parents), rng)
    if len(parents) > 1 and rng.random() < CROSS:
        second = rng.choice([n for n in range(len(parents)) if n != first])
        child = recombine(parents[first], parents[second], rng)
        if child not in (parents[first], parents[second]):
            return child, (first, second), "recombined"
    return mutate(parents[first], rng), (first,), "mutated"


def _pick(count: int, rng: Random) -> int:
    """A place, each half as likely as that before it, more or less."""
    place = 0
    while place < count - 1 and rng.random() < 0.5:
        place += 1
    return place
