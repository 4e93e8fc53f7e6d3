"""`sparrow demo`: a small real model answers, and a budget shows what it does to each token."""

import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparrow import ops
from sparrow.config import AttentionConfig, GenerateConfig, GenerateSampling, ModelConfig
from sparrow.engine.answer import Session
from sparrow.engine.pool import PAGE
from sparrow.models import Decoder
from sparrow.models.attention import Packed, PackedSparse
from sparrow.records import Completion

QUESTION = "What is the capital of France? Answer in one sentence."
STORY = "Tell a story about a sparrow that crosses the sea, and what it learns on the way."
STORY_TOKENS = 320
TEMPERATURE = 0.7
BUDGET = 192  # what the story is written under; the others are measured on its tokens
BUDGETS = (64, 96, 128, 192, 256)


def run(console: Console) -> None:
    """Load, answer, generate under a budget, and measure how far the sparse actor strays."""
    greedy = GenerateSampling(temperature=0.0, max_tokens=48)
    console.rule("[bold]1. a real model, without a hub")
    with console.status("loading smollm2-135m (the first time it is fetched, 93 MB)"):
        session = Session.open(
            GenerateConfig(model=ModelConfig(name="smollm2-135m"), sampling=greedy),
            report=lambda text: console.print(f"[dim]{text}[/]", highlight=False),
        )
    console.print(session.header(), highlight=False)

    console.rule("[bold]2. a short answer")
    console.print(f"[bold]> {QUESTION}")
    session.answer([QUESTION], on_text=lambda _, piece: console.out(piece, end="", highlight=False))
    console.print()

    console.rule(f"[bold]3. {STORY_TOKENS} tokens, each step reading at most {BUDGET} of them")
    story = _write_story(console, session)
    console.print(story.text, markup=False, highlight=False)
    console.print(f"[dim]{story.attention}[/]", highlight=False)

    console.rule("[bold]4. how far is the sparse actor from the dense policy?")
    console.print(_strays(console, session.model, story))
    console.print(
        "alpha is the sum over the vocabulary of min(dense, sparse): 1 means one distribution. "
        "The mean hides the tail; the tail, p05, is what Sparrow is about. "
        "Next: [bold]sparrow generate --help[/]"
    )


def _write_story(console: Console, session: Session) -> Completion:
    sampling = GenerateSampling(
        temperature=TEMPERATURE, top_p=1.0, max_tokens=STORY_TOKENS, min_tokens=STORY_TOKENS, seed=1
    )
    attention = AttentionConfig(budget=BUDGET)
    config = GenerateConfig(model=session.config.model, sampling=sampling, attention=attention)
    writer = Session(config=config, model=session.model, tokenizer=session.tokenizer)
    start = time.perf_counter()
    with _bar(console) as bar:
        task = bar.add_task("decoding", total=STORY_TOKENS)
        (story,) = writer.answer([STORY], on_text=lambda *_: bar.advance(task))
        bar.update(task, completed=STORY_TOKENS)
    seconds = time.perf_counter() - start
    console.print(f"[dim]{STORY_TOKENS / seconds:.1f} tokens/s, one sequence[/]", highlight=False)
    return story


def _strays(console: Console, model: Decoder, story: Completion) -> Table:
    """Exact acceptance at every token of the story under each budget, on the same tokens."""
    table = Table("budget (tokens)", "mean alpha", "p05 alpha", "tokens below 0.86")
    ids = torch.tensor([*story.prompt_ids.tolist(), *story.token_ids.tolist()])
    ids = ids.to(model.device)
    with torch.inference_mode(), _bar(console) as bar:
        task = bar.add_task("measuring", total=1 + len(BUDGETS))
        dense = _hidden(model, ids, Packed(bounds=_bounds(ids)))
        bar.advance(task)
        for budget in BUDGETS:
            attention = PackedSparse(
                bounds=_bounds(ids),
                dense_B=torch.tensor([len(story.prompt_ids)], device=ids.device),
                budgets_T=torch.full_like(ids, budget),
                page=PAGE,
            )
            sparse = _hidden(model, ids, attention)
            alpha = ops.acceptance(dense, sparse, model.head, temperature=TEMPERATURE)
            alpha = alpha[len(story.prompt_ids) - 1 : -1]  # position t gives token t + 1
            bar.advance(task)
            table.add_row(
                str(budget),
                f"{alpha.mean():.3f}",
                f"{alpha.quantile(0.05):.3f}",
                f"{(alpha < 0.86).float().mean():.1%}",
            )
    return table


def _hidden(model: Decoder, ids: torch.Tensor, attention: Any) -> torch.Tensor:
    return model(ids, torch.arange(len(ids), device=ids.device), attention)


def _bounds(ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, len(ids)], device=ids.device)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
