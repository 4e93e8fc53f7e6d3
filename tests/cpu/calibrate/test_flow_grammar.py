"""The built-in proposer: every formula is a flow that compiles; draws repeat; the statement."""

import json
from pathlib import Path
from random import Random

from sparrow.calibration.flows.check import check
from sparrow.calibration.flows.grammar import Formula, choices, draw, mutate, propose, recombine
from sparrow.calibration.flows.statement import statement
from sparrow.sparse.flows import Flow
from sparrow.sparse.flows.library import spread_means
from sparrow.sparse.flows.loading import built_in, load_flow


def made(formula: Formula, folder: Path) -> Flow:
    file = folder / "formula.py"
    file.write_text(formula.source("formula"))
    return load_flow(str(file))


def test_every_formula_is_a_flow_of_its_own(tmp_path: Path) -> None:
    """Equal digests only of equal genes."""
    rng, found = Random(1), dict[str, Formula]()
    for _ in range(60):
        formula = draw(rng)
        assert found.setdefault(made(formula, tmp_path).digest, formula) == formula
    assert len(found) > 50


def test_formulas_decode_as_they_score_and_have_kernels(tmp_path: Path) -> None:
    rng = Random(2)
    for _ in range(8):
        formula = draw(rng)
        tested = check(made(formula, tmp_path), head_size=32)
        assert tested.passed, formula
        assert tested.unordered == 0
        assert "refused" not in tested.kernels, formula


def test_each_value_of_each_gene_is_a_flow(tmp_path: Path) -> None:
    for gene in Formula.model_fields:
        for value in choices(gene):
            made(Formula().replace(**{gene: value}), tmp_path)


def test_spread_means_is_in_the_grammar(tmp_path: Path) -> None:
    """The best flow that ships has the bytes of the formula it is bred from."""
    formula = made(Formula(spread="number"), tmp_path)
    tested, shipped = check(formula), check(spread_means(4))
    assert tested.bytes == shipped.bytes


def test_children_have_the_genes_of_their_parents() -> None:
    rng = Random(3)
    one, other = Formula(), Formula(tokens=8, form="fp8", heads="max", value="norm")
    child = recombine(one, other, rng)
    assert all(
        getattr(child, gene) in (getattr(one, gene), getattr(other, gene))
        for gene in Formula.model_fields
    )
    for _ in range(30):
        changed = mutate(one, rng)
        apart = [g for g in Formula.model_fields if getattr(changed, g) != getattr(one, g)]
        assert 1 <= len(apart) <= 3


def test_proposals_repeat() -> None:
    parents = [Formula(), Formula(tokens=8, form="fp8", heads="max", value="norm")]
    first, again = ([propose(parents, Random(n)) for n in range(20)] for _ in range(2))
    assert first == again
    assert {made for _, _, made in first} == {"drawn", "mutated", "recombined"}


def test_the_statement_names_what_there_is() -> None:
    found = json.loads(json.dumps(statement()))
    assert {"logsumexp", "softmax_over_pages", "where", "take"} <= found["functions"].keys()
    assert {"sum", "mean", "reshape", "T"} <= found["methods"].keys()
    assert found["built_in"].keys() == {*built_in()}
    assert found["formats"]["int4"]["bytes"] == 0.5
