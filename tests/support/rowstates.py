"""Random rows of resident sequences, the last one spare."""

import torch

from sparrow import ops


def make_rows(rows: int, pages: int, *, page: int = 16, device: str = "cpu") -> ops.RowState:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int, high: int = 2**62) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    length_R = draw(rows, high=pages * page)
    length_R[-1] = -1
    state = ops.RowState(
        token_R=draw(rows, high=50_000),
        length_R=length_R,
        seed_R=draw(rows),
        drawn_R=draw(rows, high=1000),
        temperature_R=torch.rand(rows, generator=generator),
        table_RM=draw(rows, pages, high=9000).int(),
    )
    return ops.RowState(*(tensor.to(device) for tensor in state))


def make_draws(rows: int, *, device: str = "cpu") -> ops.Draws:
    generator = torch.Generator().manual_seed(rows + 1)
    draws = ops.Draws(
        tokens=torch.randint(0, 50_000, (rows,), generator=generator),
        logprobs=-torch.rand(rows, generator=generator),
        entropies=torch.rand(rows, generator=generator),
        ok=torch.rand(rows, generator=generator) < 0.8,
    )
    return ops.Draws(*(tensor.to(device) for tensor in draws))


def check_steps(module: object, *, device: str = "cpu") -> None:
    """A version of the row ops does what the definitions do, padding and repeated rows included."""
    for rows, width in ((5, 3), (40, 70), (9, 1)):
        at = torch.tensor([3, 0, rows - 1, 2, rows - 1], device=device)
        mine, theirs = (make_rows(rows, width + 2, page=16, device=device) for _ in range(2))
        for state in (mine, theirs):
            state.length_R.clamp_(max=width * 16 - 1)
        draws = make_draws(5, device=device)
        found = module.step_inputs(at, mine, page=16, width=width)  # type: ignore[attr-defined]
        with ops.using("reference"):
            wanted = ops.step_inputs(at, theirs, page=16, width=width)
        for name, left, right in zip(wanted._fields, found, wanted, strict=True):
            assert left.dtype == right.dtype, name
            assert torch.equal(left, right), name
        # Padding rows repeat, and which of their draws stays is nobody's business: make them equal.
        draws.tokens[4] = draws.tokens[2]
        for advance in (False, True):
            packed = module.step_outputs(at, draws, mine, advance=advance)  # type: ignore[attr-defined]
            with ops.using("reference"):
                expected = ops.step_outputs(at, draws, theirs, advance=advance)
            assert torch.equal(packed, expected)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert mine.length_R[-1] == -1
